#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

enum { MAX_THREADS = 256, NUM_JOBS = 8 };
/* How long a thread looks out for the next job before it sleeps: longer than the few operations
 * between two layers' products, shorter than what others would miss the core for. */
const long SPIN_NS = 200000;
/* Runs of neighbours for each thread: with one, a thread that is held up would keep the others waiting
 * for all of its share. */
const long RUNS = 2;

struct Job {
    std::atomic<block_function> function;
    std::atomic<void *> argument;
    std::atomic<long> num_blocks;
    std::atomic<long> num_runs; /* of neighbouring blocks */
    std::atomic<int> num_helpers;
    std::atomic<long> num_done; /* runs */
};

/* The ticket is (job number << 32 | next run).  A run is taken by exchanging the whole ticket, so a
 * thread that has slept through a job can take nothing of the next one by mistake; and what a taken
 * run needs stays in its slot of `jobs` until that run is done. */
Job jobs[NUM_JOBS];
std::atomic<uint64_t> ticket;
std::atomic<uint32_t> job_number; /* sleepers wait for this word to change */
std::atomic<int> num_sleepers;
int num_started;
pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

long now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

/* Take and do runs of job `number` until none is left. */
void work_on(uint32_t number) {
    Job &job = jobs[number % NUM_JOBS];
    for (;;) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        const long run = (uint32_t)seen, num_runs = job.num_runs.load();
        if ((uint32_t)(seen >> 32) != number || run >= num_runs) return;
        if (!ticket.compare_exchange_weak(seen, seen + 1)) continue;
        const long num_blocks = job.num_blocks.load(), stop = num_blocks * (run + 1) / num_runs;
        for (long block = num_blocks * run / num_runs; block < stop; block++)
            job.function.load()(job.argument.load(), block);
        job.num_done.fetch_add(1);
    }
}

void *help(void *place) {
    const int index = (int)(intptr_t)place;
    uint32_t seen = job_number.load();
    for (;;) {
        long deadline = 0;
        for (unsigned turn = 1; job_number.load(std::memory_order_acquire) == seen; turn++) {
            relax();
            if (turn % 64) continue;
            const long now = now_ns();
            if (deadline == 0) deadline = now + SPIN_NS;
            if (now < deadline) continue;
            num_sleepers.fetch_add(1);
            syscall(SYS_futex, &job_number, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            num_sleepers.fetch_sub(1);
        }
        seen = job_number.load();
        if (index < jobs[seen % NUM_JOBS].num_helpers.load()) work_on(seen);
    }
    return nullptr;
}

/* Threads do not survive a fork. */
void forget_threads() {
    num_started = 0;
    num_sleepers.store(0);
    pthread_mutex_init(&caller, nullptr);
}

void start_helpers(int wanted) {
    static bool is_registered = pthread_atfork(nullptr, nullptr, forget_threads) == 0;
    while (is_registered && num_started < wanted && num_started < MAX_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, help, (void *)(intptr_t)num_started)) return;
        pthread_detach(thread);
        num_started++;
    }
}

}  // namespace

void run_blocks(block_function function, void *argument, long num_blocks, int num_threads, Shares shares) {
    if (num_threads <= 1 || num_blocks <= 1 || pthread_mutex_trylock(&caller)) {
        for (long block = 0; block < num_blocks; block++) function(argument, block);
        return;
    }
    start_helpers(num_threads - 1);
    const uint32_t number = job_number.load() + 1;
    Job &job = jobs[number % NUM_JOBS];
    job.function.store(function);
    job.argument.store(argument);
    const bool is_block_alone = shares == ONE_BY_ONE || num_blocks < RUNS * num_threads;
    const long num_runs = is_block_alone ? num_blocks : RUNS * num_threads;
    job.num_blocks.store(num_blocks);
    job.num_runs.store(num_runs);
    job.num_helpers.store(num_threads - 1);
    job.num_done.store(0);
    ticket.store((uint64_t)number << 32);
    job_number.store(number);
    if (num_sleepers.load())
        syscall(SYS_futex, &job_number, FUTEX_WAKE_PRIVATE, num_threads - 1, nullptr, nullptr, 0);
    work_on(number);
    for (unsigned turn = 1; job.num_done.load(std::memory_order_acquire) < num_runs; turn++) {
        relax();
        if (turn % 1024 == 0) sched_yield(); /* who has the last block may want this core */
    }
    pthread_mutex_unlock(&caller);
}
