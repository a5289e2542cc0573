/* Products of groups with AVX512-VNNI. */
#include "groups.h"

#if defined(HAS_AVX512_VNNI)
#if defined(DRAFTHOUSE_SPELLED)
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#endif
#include "groups_kernel.h"
#include "groups_zmm.h"

extern const groups::Variant groups_avx512_vnni = {"avx512-vnni", nullptr, groups::round_row<Zmm>, groups::multiply<Zmm>};
#endif
