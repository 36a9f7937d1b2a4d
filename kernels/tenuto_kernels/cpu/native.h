// Vector types, conversions and the one matrix micro-kernel that the linear and attention operators share.
//
// Written with the compiler's vector extensions: the same source becomes AVX-512, AVX2, SSE or NEON code, whichever the
// machine that builds it has. The tile is chosen so that its accumulators fill the register file.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16, NV = 3, MR = 8;  // 24 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int W = 8, NV = 2, MR = 6;  // 12 of 16
#else
constexpr int W = 4, NV = 2, MR = 6;  // 12 of 16 (SSE) or of 32 (NEON)
#endif
constexpr int NR = W * NV;  // columns of a weight panel, lanes of a query panel
constexpr int AHEAD = 2048;  // weights of a streamed panel are asked for this many before they are used

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vs __attribute__((vector_size(W * 2)));

#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
// bf16 is the upper half of an fp32. By name where the compiler's own widening takes five instructions in place of two.
INLINE vf load(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    vs h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - vf{}; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(uint16_t* p, float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void store(uint16_t* p, vf v) {
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vu half = (vu)(v != v ? (vu{} + 0x7fc0) : rounded);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)half));
#else
    vs h = __builtin_convertvector(half, vs);
    std::memcpy(p, &h, sizeof h);
#endif
}

// The sum of all lanes, in every lane's place: log2(W) rotations.
INLINE float sum(vf v) {
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
#if defined(__clang__)
    for (int step = W / 2; step > 0; step /= 2) {
        vf turned;
        for (int i = 0; i < W; i++) turned[i] = v[(i + step) % W];
        v += turned;
    }
#else
#pragma GCC unroll 4
    for (int step = W / 2; step > 0; step /= 2) v += __builtin_shuffle(v, (lane + step) & (W - 1));
#endif
    return v[0];
}
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

// exp for x <= 88: range reduction to |r| <= ln2/2, then a degree-5 polynomial fitted for least relative error (9e-8)
// with its constant held at 1, so that exp(0) is exactly 1. Exactly 0 below -87: a masked score (-inf) adds nothing.
INLINE vf vexp(vf x) {
    const vf shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const vf n = shifted - 12582912.0f;
    const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = r * 0.00829031467f + 0.0418979293f;
    p = p * r + 0.166676362f;
    p = p * r + 0.499991495f;
    p = p * r + 0.999999707f;
    p = p * r + 1.0f;
    const vi bits = (vi)p + ((vi)shifted << 23);  // the magic number's own low bits are shifted out
    return x < -87.0f ? vf{} : (vf)bits;
}

// One [rows, NR] result: where its sums start and where they go. `from` null: at zero; `from_stride` 0: every row at the
// same values (a bias). Row i of the result goes to `to + i * to_stride`.
struct Sums {
    const float* from;
    int64_t from_stride;
    float* to;
    int64_t to_stride;
};

// to[rows, NR] = from + A[rows, depth] * B[depth, NR]. A is row-major with `a_stride` between rows, or, `turned`, between
// columns. B is a panel of fp32 or bf16. Every output is one chain of multiply-adds in the order of depth, whatever
// `rows` is: that is what makes each row's bits independent of the rows beside it. `ahead` is memory that will be read
// next (a hint; its address may be beyond what is there).
template <int rows, bool turned, typename B>
__attribute__((noinline)) void tile(const float* a, int64_t a_stride, const B* b, Sums s, int64_t depth,
                                    const char* ahead) {
    vf acc[rows][NV];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) acc[i][j] = s.from ? load(s.from + i * s.from_stride + j * W) : vf{};
    for (int64_t k = 0; k < depth; k++) {
        vf column[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) column[j] = load(b + k * NR + j * W);
        if (sizeof(B) == 2) {
            __builtin_prefetch(b + k * NR + AHEAD);
            if (NR * 2 > 64) __builtin_prefetch(b + k * NR + AHEAD + 32);
        } else {
            __builtin_prefetch(ahead + k * NR * 2);
            if (NR * 2 > 64) __builtin_prefetch(ahead + k * NR * 2 + 64);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const vf x = splat(turned ? a[k * a_stride + i] : a[i * a_stride + k]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) acc[i][j] += x * column[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) store(s.to + i * s.to_stride + j * W, acc[i][j]);
}

// The same for `count` <= MR rows.
template <bool turned, typename B, int rows = MR>
INLINE void tile_rows(int count, const float* a, int64_t a_stride, const B* b, Sums s, int64_t depth,
                      const char* ahead = nullptr) {
    if (count == rows)
        tile<rows, turned>(a, a_stride, b, s, depth, ahead);
    else if constexpr (rows > 1)
        tile_rows<turned, B, rows - 1>(count, a, a_stride, b, s, depth, ahead);
}

// Any number of rows into c [rows, NR], added to what is there if `accumulate`.
template <bool turned, bool accumulate>
void tiles(int64_t rows, const float* a, int64_t a_stride, const float* b, float* c, int64_t depth) {
    for (int64_t i = 0; i < rows; i += MR) {
        const int count = (int)(rows - i < MR ? rows - i : MR);
        const Sums sums{accumulate ? c + i * NR : nullptr, NR, c + i * NR, NR};
        tile_rows<turned>(count, turned ? a + i : a + i * a_stride, a_stride, b, sums, depth, (const char*)b);
    }
}

template <typename T>
INLINE void widen(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = to_float(from[i]);
}

// Cache-line aligned working memory, kept by a thread from call to call; on huge pages where there is much of it.
class Scratch {
    static constexpr int64_t HUGE_PAGE = 2 << 20;

  public:
    float* at_least(int64_t floats) {
        if (floats > size_) {
            std::free(data_);
            const size_t page = floats * 4 < HUGE_PAGE ? 64 : HUGE_PAGE, bytes = ((size_t)floats * 4 + page - 1) / page * page;
            data_ = (float*)std::aligned_alloc(page, bytes);
            if (!data_) std::abort();
#if defined(__linux__)
            if (page == HUGE_PAGE) madvise(data_, bytes, MADV_HUGEPAGE);  // advice: an error leaves ordinary pages
#endif
            size_ = floats;
        }
        return data_;
    }
    ~Scratch() { std::free(data_); }

  private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};
