"""Writes noise_vectors.json from a scalar Philox that shares no code with the product.

python tests/spec/make_noise_vectors.py > tests/spec/noise_vectors.json
"""

from __future__ import annotations

import json
import math

MASK = 0xFFFFFFFF


def philox_block(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, one block, in plain integers (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def noise_vector(seed: int, position: int, token_id: int, stream: int) -> dict[str, int | float]:
    """The first word and the Gumbel value of one (seed, position, token, stream)."""
    word = philox_block([token_id, position, stream, 0], [seed & MASK, seed >> 32])[0]
    value = -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
    return {
        "seed": seed,
        "position": position,
        "token_id": token_id,
        "stream": stream,
        "word": word,
        "gumbel": value,
    }


def main() -> None:
    seeds = (0, 1, 42, 2**32, 2**63 + 12345, 2**64 - 1)
    places = ((0, 0, 0), (0, 1, 0), (1, 0, 0), (7, 4095, 0), (31_999, 151_935, 3), (5, 17, 1))
    vectors = [noise_vector(seed, *place) for seed in seeds for place in places]
    print(json.dumps(vectors, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
