// The templates behind native.cpp and native_decoder.cpp: matrix products over packed panels and the row-wise pieces of a
// decoder layer. No state: every buffer belongs to the caller.
#pragma once

#include <algorithm>

#include "native.h"
#include "native_pool.h"

namespace {

constexpr int64_t BLOCK_BYTES = 320 << 10;  // rows of x kept in the second-level cache while all panels pass by
constexpr int64_t DEPTH = 96;               // inputs whose weights (18 KiB a panel) stay in the first-level cache

// How a product of M rows and some panels is cut into items for the threads: some panels for one block of rows.
struct Cut {
    int64_t block, groups, some, items;  // rows of a block, groups of panels, panels of a group, items in all

    Cut(int64_t M, int64_t K, int64_t panels, int threads) {
        block = std::max<int64_t>(MR, BLOCK_BYTES / (K * 4) / MR * MR);
        const int64_t blocks = (M + block - 1) / block;
        block = ((M + blocks - 1) / blocks + MR - 1) / MR * MR;
        some = M > MR ? 1 : std::max<int64_t>(1, panels / (4 * threads));  // few rows leave little work a panel
        groups = (panels + some - 1) / some;
        items = groups * blocks;
    }
};

// Where one panel's results go: `add` continues the sums that are there, else they start at `bias` or at zero.
template <typename OT>
struct Target {
    OT* out;
    int64_t stride, column, width;
    const float* bias;
    bool add;

    // Fp32 and a whole panel: the tile writes to its place itself. Otherwise through c [count, NR].
    bool direct() const { return sizeof(OT) == 4 && width == NR; }
    void put_rows(const float* c, int64_t first, int64_t count) const {
        for (int64_t i = 0; i < count; i++) {
            OT* row = out + (first + i) * stride + column;
            for (int j = 0; j < width; j++)
                put(row + j, c[i * NR + j] + (bias ? bias[column + j] : 0.0f) + (add ? to_float(row[j]) : 0.0f));
        }
    }
    // The sums of rows [first, ...) from the first of the inputs, or (later) from what the earlier ones left in c.
    Sums sums(bool start, bool end, float* c, int64_t first) const {
        float* at = (float*)out + first * stride + column;
        Sums s{start ? nullptr : c, NR, end && direct() ? at : c, end && direct() ? stride : NR};
        if (start && direct() && add) s.from = at, s.from_stride = stride;
        if (start && direct() && bias) s.from = bias + column, s.from_stride = 0;
        return s;
    }
};

// ---- weights as the products read them -------------------------------------------------------------------------

// fp32 or bf16: panels [K, NR].
template <typename T>
struct Dense {
    const T* data;
    static constexpr int STREAM = MR;  // up to this many rows a panel is read as it streams by

    Dense panel(int64_t p, int64_t K) const { return {data + p * K * NR}; }
    const char* ahead(int64_t k) const { return (const char*)(data + k * NR); }
    void wide(int64_t k, int64_t depth, float* out) const { ::widen(data + k * NR, out, depth * NR); }
    void stream(int rows, const float* a, int64_t K, Sums s) const { tile_rows<false>(rows, a, K, data, s, K, ahead(0)); }
};

INLINE vf load_half(const uint16_t* p) {  // fp16
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf v;
    for (int i = 0; i < W; i++) {
        const uint32_t h = p[i], exponent = h >> 10 & 31, mantissa = h & 1023;
        const float size = exponent ? std::ldexp(1.0f + mantissa / 1024.0f, (int)exponent - 15) : std::ldexp((float)mantissa, -24);
        v[i] = h >> 15 ? -size : size;
    }
    return v;
#endif
}

// Groups of GROUP inputs, each: scales fp16 [NR], with 4 bits minima fp16 [NR], then codes in words of 32 bits, the first
// of its inputs in the lowest bits: 4 bits [GROUP / 8, NR], 8 bits signed [GROUP / 4, NR]. Words, because widening bytes
// lane by lane is what compilers do with anything narrower.
constexpr int64_t GROUP = 32;

template <int bits>
struct Quant {
    const uint8_t* data;
    static constexpr int STREAM = 4;  // more rows share a widened copy
    static constexpr int64_t HEAD = bits == 4 ? 4 * NR : 2 * NR, BYTES = HEAD + GROUP * NR * bits / 8;

    Quant panel(int64_t p, int64_t K) const { return {data + p * (K / GROUP) * BYTES}; }
    const char* ahead(int64_t k) const { return (const char*)(data + k / GROUP * BYTES); }

    // each(k, w): the weights w[NV] of every input k of a group, fp32. One rounding: code times scale is exact.
    template <typename Each>
    static inline __attribute__((always_inline)) void decode(const uint8_t* group, const Each& each) {
        vf scale[NV], least[NV];
        for (int j = 0; j < NV; j++) {
            scale[j] = load_half((const uint16_t*)group + j * W);
            least[j] = bits == 4 ? load_half((const uint16_t*)group + NR + j * W) : vf{};
        }
        const uint8_t* codes = group + HEAD;
        constexpr int64_t SHARE = 32 / bits;  // inputs of a word
        for (int64_t k = 0; k < GROUP; k += SHARE) {
            vu word[NV];
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) std::memcpy(&word[j], codes + (k / SHARE * NR + j * W) * 4, sizeof word[j]);
#pragma GCC unroll 8
            for (int i = 0; i < SHARE; i++) {
                vf w[NV];
#pragma GCC unroll 4
                for (int j = 0; j < NV; j++) {
                    if (bits == 4)
                        w[j] = __builtin_convertvector((vi)(word[j] >> 4 * i & 15), vf) * scale[j] + least[j];
                    else
                        w[j] = __builtin_convertvector((vi)(word[j] << (24 - 8 * i % 32)) >> 24, vf) * scale[j];
                }
                each(k + i, w);
            }
        }
    }

    // `depth` inputs from k, a multiple of GROUP, to out [depth, NR].
    void wide(int64_t k, int64_t depth, float* out) const {
        for (int64_t at = 0; at < depth; at += GROUP) {
            const uint8_t* group = data + (k + at) / GROUP * BYTES;
            for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(group + 4 * BYTES + line);
            decode(group, [&](int64_t i, const vf* w) {
                for (int j = 0; j < NV; j++) store(out + (at + i) * NR + j * W, w[j]);
            });
        }
    }

    template <int rows>
    __attribute__((noinline)) void stream_rows(const float* a, int64_t K, Sums s) const {
        vf acc[rows][NV];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < NV; j++) acc[i][j] = s.from ? load(s.from + i * s.from_stride + j * W) : vf{};
        for (int64_t k = 0; k < K; k += GROUP) {
            const uint8_t* group = data + k / GROUP * BYTES;
            for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(group + 4 * BYTES + line);
            decode(group, [&](int64_t at, const vf* w) {
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) {
                    const vf x = splat(a[i * K + k + at]);
#pragma GCC unroll 4
                    for (int j = 0; j < NV; j++) acc[i][j] += x * w[j];
                }
            });
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < NV; j++) store(s.to + i * s.to_stride + j * W, acc[i][j]);
    }

    void stream(int rows, const float* a, int64_t K, Sums s) const {
        if (rows == 1) stream_rows<1>(a, K, s);
        else if (rows == 2) stream_rows<2>(a, K, s);
        else if (rows == 3) stream_rows<3>(a, K, s);
        else stream_rows<4>(a, K, s);
    }
};

// Calls run(weights) with the accessor that `kind` names: 0 fp32, 1 bf16, 4 and 8 bits.
template <typename Run>
void with_weights(const void* data, int64_t kind, const Run& run) {
    if (kind == 0) run(Dense<float>{(const float*)data});
    else if (kind == 1) run(Dense<uint16_t>{(const uint16_t*)data});
    else if (kind == 4) run(Quant<4>{(const uint8_t*)data});
    else run(Quant<8>{(const uint8_t*)data});
}

// ---- products --------------------------------------------------------------------------------------------------

// One panel (NR outputs) for rows [0, rows) of x. Many rows pass over DEPTH inputs at a time, whose weights then stay
// in the first-level cache, widened once; the sums wait in scratch: the chain of multiply-adds is the same.
template <typename Weights, typename OT>
void panel(const float* x, const Weights& w, const Target<OT>& to, int64_t rows, int64_t K, float* scratch) {
    float *wide = scratch, *c = scratch + DEPTH * NR;
    if (rows <= Weights::STREAM) {
        w.stream((int)rows, x, K, to.sums(true, true, c, 0));
        if (!to.direct()) to.put_rows(c, 0, rows);
        return;
    }
    for (int64_t k = 0; k < K; k += DEPTH) {
        const int64_t depth = std::min(DEPTH, K - k);
        const bool end = k + depth == K;
        w.wide(k, depth, wide);
        for (int64_t m = 0; m < rows; m += MR) {
            const int count = (int)std::min<int64_t>(MR, rows - m);
            tile_rows<false>(count, x + m * K + k, K, (const float*)wide, to.sums(k == 0, end, c + m * NR, m), depth,
                             w.ahead(k + depth));
        }
    }
    if (!to.direct()) to.put_rows(c, 0, rows);
}

// x in fp32: itself, or a widened copy in this thread's scratch.
template <typename XT>
const float* widened(const XT* x, int64_t M, int64_t K, int threads) {
    if (sizeof(XT) == 4) return (const float*)x;
    static thread_local Scratch wide;
    float* rows = wide.at_least(M * K);
    Pool::shared().run(M, threads, [&](int64_t m) { widen(x + m * K, rows + m * K, K); });
    return rows;
}

// out [M, O] (+)= x [M, K] * w (+ bias). Bias and `add` exclude each other.
template <typename XT, typename Weights>
void linear(const XT* x, const Weights& w, const float* bias, XT* out, int64_t M, int64_t O, int64_t K, bool add,
            int threads) {
    if (M == 0) return;
    const float* a = widened(x, M, K, threads);
    const int64_t panels = (O + NR - 1) / NR;
    const Cut cut(M, K, panels, threads);
    Pool::shared().run(cut.items, threads, [&](int64_t item) {
        static thread_local Scratch own;
        float* scratch = own.at_least((DEPTH + cut.block) * NR);
        const int64_t m = item / cut.groups * cut.block, rows = std::min(cut.block, M - m);
        const int64_t first = item % cut.groups * cut.some;
        for (int64_t p = first; p < std::min(panels, first + cut.some); p++)
            if (rows > 0)
                panel(a + m * K, w.panel(p, K),
                      Target<XT>{out + m * O, O, p * NR, std::min<int64_t>(NR, O - p * NR), bias, add}, rows, K,
                      scratch);
    });
}

INLINE vf silu(vf g) {
    const vf x = -g < 88.0f ? -g : splat(88.0f);
    return g / (1.0f + vexp(x));
}

// out [rows, NR] = silu(g) * u, both [rows, NR].
INLINE void gate_rows(const float* g, const float* u, int64_t rows, float* out, int64_t stride) {
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < NR; j += W)
            store(out + i * stride + j, silu(load(g + i * NR + j)) * load(u + i * NR + j));
}

// out [M, F] = silu(x * gate) * (x * up), both [K, F] with F a multiple of NR: the two panels of the same columns are
// computed side by side, so that what they leave never goes through memory.
// `w` holds the panels of gate, then those of up.
template <typename Weights>
void gated(const float* x, const Weights& w, float* out, int64_t M, int64_t F, int64_t K, int threads) {
    if (M == 0) return;
    constexpr int64_t HALF = (DEPTH / 2 + GROUP - 1) / GROUP * GROUP;
    const int64_t panels = F / NR;
    const Cut cut(M, K, panels, threads);
    Pool::shared().run(cut.items, threads, [&](int64_t item) {
        static thread_local Scratch own;
        float* scratch = own.at_least((2 * HALF + 2 * cut.block) * NR);
        const int64_t first = item / cut.groups * cut.block, rows = std::min(cut.block, M - first);
        float *wide_g = scratch, *wide_u = wide_g + HALF * NR, *g = wide_u + HALF * NR, *u = g + cut.block * NR;
        const float* a = x + first * K;
        const int64_t begin = item % cut.groups * cut.some;
        for (int64_t p = begin; p < std::min(panels, begin + cut.some); p++) {
            const Weights gate = w.panel(p, K), up = w.panel(panels + p, K);
            float* to = out + first * F + p * NR;
            if (rows <= Weights::STREAM) {
                gate.stream((int)rows, a, K, Sums{nullptr, 0, g, NR});
                up.stream((int)rows, a, K, Sums{nullptr, 0, u, NR});
                gate_rows(g, u, rows, to, F);
                continue;
            }
            for (int64_t k = 0; k < K; k += HALF) {
                const int64_t depth = std::min(HALF, K - k);
                gate.wide(k, depth, wide_g);
                up.wide(k, depth, wide_u);
                for (int64_t m = 0; m < rows; m += MR) {
                    const int count = (int)std::min<int64_t>(MR, rows - m);
                    float *cg = g + m * NR, *cu = u + m * NR;
                    tile_rows<false>(count, a + m * K + k, K, (const float*)wide_g, Sums{k ? cg : nullptr, NR, cg, NR},
                                     depth, gate.ahead(k + depth));
                    tile_rows<false>(count, a + m * K + k, K, (const float*)wide_u, Sums{k ? cu : nullptr, NR, cu, NR},
                                     depth, up.ahead(k + depth));
                    if (k + depth == K) gate_rows(cg, cu, count, to + m * F, F);
                }
            }
        }
    });
}

// Calls row(t) for every t, on several threads where there are enough rows to pay for it.
template <typename Row>
void each_row(int64_t rows, int threads, const Row& row) {
    constexpr int64_t SOME = 8;
    Pool::shared().run((rows + SOME - 1) / SOME, threads, [&](int64_t n) {
        for (int64_t t = n * SOME; t < std::min(rows, (n + 1) * SOME); t++) row(t);
    });
}

template <typename T>
void rms_norm(const T* x, const float* weight, T* out, int64_t rows, int64_t H, float eps, int threads) {
    each_row(rows, threads, [&](int64_t t) {
        const T* row = x + t * H;
        vf total{};
        int64_t i = 0;
        for (; i + W <= H; i += W) {
            vf v = load(row + i);
            total += v * v;
        }
        float squares = sum(total);
        for (; i < H; i++) squares += to_float(row[i]) * to_float(row[i]);
        const float scale = 1.0f / std::sqrt(squares / (float)H + eps);
        for (i = 0; i + W <= H; i += W) store(out + t * H + i, load(row + i) * scale * load(weight + i));
        for (; i < H; i++) put(out + t * H + i, to_float(row[i]) * scale * weight[i]);
    });
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t F, int threads) {
    each_row(rows, threads, [&](int64_t t) {
        const T *gate = gate_up + t * 2 * F, *up = gate + F;
        int64_t i = 0;
        for (; i + W <= F; i += W) {
            store(out + t * F + i, silu(load(gate + i)) * load(up + i));
        }
        for (; i < F; i++) {
            const float g = to_float(gate[i]);
            put(out + t * F + i, g / (1.0f + std::exp(-g)) * to_float(up[i]));
        }
    });
}

// Rotates one head: the pairs are (i, i + D/2). cos and sin have D/2 entries.
template <typename From, typename To>
INLINE void rotate(const From* from, To* to, const float* cosine, const float* sine, int64_t D) {
    const int64_t half = D / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(from + i), b = load(from + half + i), c = load(cosine + i), s = load(sine + i);
        store(to + i, a * c - b * s);
        store(to + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = to_float(from[i]), b = to_float(from[half + i]);
        put(to + i, a * cosine[i] - b * sine[i]);
        put(to + half + i, b * cosine[i] + a * sine[i]);
    }
}

struct RopeStore {
    int64_t tokens, q_heads, kv_heads, D, q_stride, k_stride, v_stride, layers, layer, block_size, blocks;
};

template <typename T, typename P>
void rope_store(T* q, T* k, const T* v, const float* cosine, const float* sine, P* pool, const int64_t* slots,
                const RopeStore& s, int threads) {
    const int64_t head = s.block_size * s.D, side = s.kv_heads * head;
    each_row(s.tokens, threads, [&](int64_t t) {
        const float *c = cosine + t * s.D / 2, *n = sine + t * s.D / 2;
        for (int64_t h = 0; h < s.q_heads; h++) {
            T* row = q + t * s.q_stride + h * s.D;
            rotate(row, row, c, n, s.D);
        }
        const int64_t block = slots[t] / s.block_size, offset = slots[t] % s.block_size;
        P* keys = pool + (block * s.layers + s.layer) * 2 * side + offset * s.D;
        for (int64_t h = 0; h < s.kv_heads; h++) {
            T* row = k + t * s.k_stride + h * s.D;
            const T* value = v + t * s.v_stride + h * s.D;
            rotate(row, row, c, n, s.D);
            P *to_key = keys + h * head, *to_value = to_key + side;
            int64_t i = 0;
            for (; i + W <= s.D; i += W) {
                store(to_key + i, load(row + i));
                store(to_value + i, load(value + i));
            }
            for (; i < s.D; i++) {
                put(to_key + i, to_float(row[i]));
                put(to_value + i, to_float(value[i]));
            }
        }
    });
}

}  // namespace
