// Blocks from one place in memory to another, with the CRC-32 of each. On the calling thread: the workers that copy blocks call
// it while the model's threads compute.
//
// The sum is that of ISA-L and zlib, which the rest of the server uses. It is computed here too because a library's call for
// each block comes back to the interpreter, which others hold: 254 blocks of 369 kB take 21 ms this way and 25 with ISA-L's
// calls where nothing else runs, 45 and 87 beside a thread that is busy in Python.
#include <cstdint>
#include <cstring>
#if defined(__PCLMUL__)
#include <immintrin.h>
#endif

namespace {

constexpr int HASH_BYTES = 16;

#if defined(__PCLMUL__)
constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // CRC-32 of IEEE 802.3, lowest bit first

constexpr uint32_t times_x(uint32_t rest) { return (rest >> 1) ^ (rest & 1 ? POLYNOMIAL : 0); }

struct Table {
    uint32_t of[256];
    constexpr Table() : of() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t rest = byte;
            for (int bit = 0; bit < 8; bit++) rest = times_x(rest);
            of[byte] = rest;
        }
    }
};
constexpr Table TABLE;

// The remainder of `rest` followed by these bytes, without the inversions at both ends.
uint32_t bytewise(uint32_t rest, const uint8_t* p, int64_t count) {
    for (int64_t i = 0; i < count; i++) rest = (rest >> 8) ^ TABLE.of[(rest ^ p[i]) & 0xFF];
    return rest;
}

// x^bits modulo the polynomial, lowest bit first and shifted by one, as a carry-less product of reflected words wants it
// (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009).
constexpr int64_t power(int bits) {
    uint32_t rest = 0x80000000;
    for (int bit = 0; bit < bits; bit++) rest = times_x(rest);
    return (int64_t)rest << 1;
}

// What x contributes to the remainder `FAR` bits further on, added to what lies there.
template <int FAR>
inline __m128i fold(__m128i x, __m128i there) {
    const __m128i k = _mm_set_epi64x(power(FAR - 32), power(FAR + 32));
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), there);
}

inline __m128i at(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }

uint32_t remainder_of(uint32_t rest, const uint8_t* p, int64_t count) {
    if (count < 64) return bytewise(rest, p, count);
    __m128i a = _mm_xor_si128(at(p), _mm_cvtsi32_si128((int)rest)), b = at(p + 16), c = at(p + 32), d = at(p + 48);
    int64_t i = 64;
    for (; i + 64 <= count; i += 64) {
        _mm_prefetch((const char*)(p + i + 1024), _MM_HINT_T0);
        a = fold<512>(a, at(p + i));
        b = fold<512>(b, at(p + i + 16));
        c = fold<512>(c, at(p + i + 32));
        d = fold<512>(d, at(p + i + 48));
    }
    uint8_t folded[16];
    _mm_storeu_si128((__m128i*)folded, fold<128>(fold<128>(fold<128>(a, b), c), d));
    return bytewise(bytewise(0, folded, 16), p + i, count - i);
}

uint32_t sum_of(const uint8_t* hash, const uint8_t* p, int64_t count) {
    return ~remainder_of(bytewise(~0u, hash, HASH_BYTES), p, count);
}
#endif

// Past the caches where it can: nobody reads the copy soon, and a cache would fetch what is overwritten first.
void copy(uint8_t* to, const uint8_t* from, int64_t count) {
#if defined(__PCLMUL__)
    if (((uintptr_t)to | (uintptr_t)count) % 64 == 0) {
        for (int64_t i = 0; i < count; i += 64) {
            const __m128i a = at(from + i), b = at(from + i + 16), c = at(from + i + 32), d = at(from + i + 48);
            _mm_stream_si128((__m128i*)(to + i), a);
            _mm_stream_si128((__m128i*)(to + i + 16), b);
            _mm_stream_si128((__m128i*)(to + i + 32), c);
            _mm_stream_si128((__m128i*)(to + i + 48), d);
        }
        return;
    }
#endif
    std::memcpy(to, from, (size_t)count);
}

}  // namespace

// Block from[i] of `src` to block to[i] of `dst` (from, to null: i; dst null: only summed). sums[i] is the CRC-32 of hash i
// followed by the block: with `wrong` null it is written; otherwise it is what the block should have, and one that has not is not
// copied and wrong[i] becomes 1. sums null: only copied. Returns 0 if this processor has no instruction for sums, else 1.
//
// Block by block: what has been summed is still in the cache when it is copied.
extern "C" int tn_copy_blocks(const uint8_t* src, const int32_t* from, uint8_t* dst, const int32_t* to, int64_t count,
                              int64_t block_bytes, const uint8_t* hashes, uint32_t* sums, uint8_t* wrong) {
#if !defined(__PCLMUL__)
    (void)hashes, (void)wrong;
    if (sums) return 0;
#endif
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* block = src + block_bytes * (from ? from[i] : i);
#if defined(__PCLMUL__)
        if (sums) {
            const uint32_t sum = sum_of(hashes + HASH_BYTES * i, block, block_bytes);
            if (wrong && sum != sums[i]) {
                wrong[i] = 1;
                continue;
            }
            sums[i] = sum;
        }
#endif
        if (dst) copy(dst + block_bytes * (to ? to[i] : i), block, block_bytes);
    }
#if defined(__PCLMUL__)
    _mm_sfence();
#endif
    return 1;
}
