// The small C ABI behind native.py: linear layers, norms, activation, rotary embedding with KV write.
// Attention is in native_attention.cpp. No state: every buffer belongs to the caller.
//
// Conventions: `*_bf16` flags say which of fp32 / bf16 a buffer holds; `threads` is the caller's thread count.

#include <algorithm>

#include "native.h"
#include "native_pool.h"

namespace {

constexpr int64_t BLOCK_BYTES = 640 << 10;  // rows of x kept in the second-level cache while all panels pass by

// One panel (NR outputs) for rows [0, rows) of x, written to out with the bias added.
template <typename WT, typename OT>
void panel(const float* x, const WT* w, const float* bias, OT* out, int64_t rows, int64_t O, int64_t K, int64_t column,
           float* unpacked) {
    alignas(64) float c[MR * NR];
    const int width = (int)std::min<int64_t>(NR, O - column);
    const bool convert = sizeof(WT) == 2 && rows > MR;  // few rows: cheaper to widen the weights as they stream
    if (convert) widen(w, unpacked, K * NR);
    for (int64_t m = 0; m < rows; m += MR) {
        const int count = (int)std::min<int64_t>(MR, rows - m);
        if (convert)
            tile_rows<false, false>(count, x + m * K, K, (const float*)unpacked, c, K);
        else
            tile_rows<false, false>(count, x + m * K, K, w, c, K);
        for (int i = 0; i < count; i++) {
            OT* row = out + (m + i) * O + column;
            if (width == NR)
                for (int j = 0; j < NR; j += W)
                    store(row + j, bias ? load(c + i * NR + j) + load(bias + column + j) : load(c + i * NR + j));
            else
                for (int j = 0; j < width; j++) put(row + j, c[i * NR + j] + (bias ? bias[column + j] : 0.0f));
        }
    }
}

template <typename XT, typename WT>
void linear(const XT* x, const WT* w, const float* bias, XT* out, int64_t M, int64_t O, int64_t K, int threads) {
    if (M == 0) return;
    const int64_t panels = (O + NR - 1) / NR;
    int64_t block = std::max<int64_t>(MR, BLOCK_BYTES / (K * 4) / MR * MR);
    const int64_t blocks = (M + block - 1) / block;
    block = ((M + blocks - 1) / blocks + MR - 1) / MR * MR;
    const float* a = (const float*)x;
    if (sizeof(XT) == 2) {
        static thread_local Scratch wide;
        float* rows = wide.at_least(M * K);
        Pool::shared().run(blocks, threads, [&](int64_t n) {
            widen(x + n * block * K, rows + n * block * K, std::max<int64_t>(0, std::min(block, M - n * block)) * K);
        });
        a = rows;
    }
    // An item: some panels for one block of rows. Few rows leave little work a panel, so an item takes several.
    const int64_t some = M > MR ? 1 : std::max<int64_t>(1, panels / (4 * threads));
    const int64_t groups = (panels + some - 1) / some;
    Pool::shared().run(groups * blocks, threads, [&](int64_t item) {
        static thread_local Scratch unpacked;
        float* scratch = sizeof(WT) == 2 && M > MR ? unpacked.at_least(K * NR) : nullptr;
        const int64_t m = item / groups * block, rows = std::min(block, M - m), first = item % groups * some;
        for (int64_t p = first; p < std::min(panels, first + some); p++)
            if (rows > 0) panel(a + m * K, w + p * K * NR, bias, out + m * O, rows, O, K, p * NR, scratch);
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
            const vf g = load(gate + i), x = -g < 88.0f ? -g : splat(88.0f);
            store(out + t * F + i, g / (1.0f + vexp(x)) * load(up + i));
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

extern "C" {

int tn_panel_width() { return NR; }

void tn_linear(const void* x, int x_bf16, const void* w, int w_bf16, const float* bias, void* out, int64_t M, int64_t O,
               int64_t K, int threads) {
    if (x_bf16 && w_bf16)
        linear((const uint16_t*)x, (const uint16_t*)w, bias, (uint16_t*)out, M, O, K, threads);
    else if (x_bf16)
        linear((const uint16_t*)x, (const float*)w, bias, (uint16_t*)out, M, O, K, threads);
    else if (w_bf16)
        linear((const float*)x, (const uint16_t*)w, bias, (float*)out, M, O, K, threads);
    else
        linear((const float*)x, (const float*)w, bias, (float*)out, M, O, K, threads);
}

void tn_rms_norm(const void* x, int bf16, const float* weight, void* out, int64_t rows, int64_t H, float eps,
                 int threads) {
    if (bf16)
        rms_norm((const uint16_t*)x, weight, (uint16_t*)out, rows, H, eps, threads);
    else
        rms_norm((const float*)x, weight, (float*)out, rows, H, eps, threads);
}

void tn_silu_mul(const void* gate_up, int bf16, void* out, int64_t rows, int64_t F, int threads) {
    if (bf16)
        silu_mul((const uint16_t*)gate_up, (uint16_t*)out, rows, F, threads);
    else
        silu_mul((const float*)gate_up, (float*)out, rows, F, threads);
}

// `shape` is a RopeStore, field by field. Returns 0, or 1 where a slot or the layer does not lie in the pool.
int tn_rope_store(void* q, void* k, const void* v, int bf16, const float* cosine, const float* sine, void* pool,
                   int pool_bf16, const int64_t* slots, const int64_t* shape, int threads) {
    RopeStore s;
    std::memcpy(&s, shape, sizeof s);
    if (s.layer < 0 || s.layer >= s.layers) return 1;
    for (int64_t t = 0; t < s.tokens; t++)
        if (slots[t] < 0 || slots[t] >= s.blocks * s.block_size) return 1;
    if (bf16 && pool_bf16)
        rope_store((uint16_t*)q, (uint16_t*)k, (const uint16_t*)v, cosine, sine, (uint16_t*)pool, slots, s, threads);
    else if (bf16)
        rope_store((uint16_t*)q, (uint16_t*)k, (const uint16_t*)v, cosine, sine, (float*)pool, slots, s, threads);
    else if (pool_bf16)
        rope_store((float*)q, (float*)k, (const float*)v, cosine, sine, (uint16_t*)pool, slots, s, threads);
    else
        rope_store((float*)q, (float*)k, (const float*)v, cosine, sine, (float*)pool, slots, s, threads);
    return 0;
}
}
