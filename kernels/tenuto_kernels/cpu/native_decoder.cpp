// A whole forward pass of a Llama-family decoder in one call: for every layer norm, projections, rotary embedding with KV
// write, paged attention, output projection, norm, gated MLP; then norm and head for the wanted tokens. Activations are
// fp32, weights and KV fp32 or bf16. Nothing is new here but the order: the operators are those of native_ops.h and
// native_attention.cpp, and what they promise of a row's bits holds for the whole.
//
// Working memory grows with the batch and belongs to the calling thread.

#include "native_attention.h"
#include "native_ops.h"

namespace {

// Field by field as native_decoder.py declares them.
struct Linear {
    const void* weight;  // panels
    const float* bias;
    int64_t outputs, inputs, kind;
};

struct Layer {
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
    Linear qkv, o, gate_up, down;
};

struct Decoder {
    const Layer* layers;
    const float* norm;
    Linear head;
    int64_t count, hidden, q_heads, kv_heads, D, F;
    float eps, scale;
};

struct Batch {
    int64_t tokens, rows, max_blocks, wanted, blocks, block_size, pool_bf16, invariant;
    void* pool;
    const float *cosine, *sine;  // [tokens, D / 2]
    const int64_t *slots, *index;  // [tokens], [wanted]: the tokens whose logits are asked for
    const int32_t *start, *context, *tables;
};

void multiply(const Linear& l, const float* x, float* out, int64_t M, bool add, int threads) {
    const float* bias = l.bias;
    if (add && bias) {  // the sums start at what is there: the bias joins it first
        for (int64_t m = 0; m < M; m++)
            for (int64_t i = 0; i < l.outputs; i++) out[m * l.outputs + i] += bias[i];
        bias = nullptr;
    }
    with_weights(l.weight, l.kind,
                 [&](auto w) { linear(x, w, bias, out, M, l.outputs, l.inputs, add, threads); });
}

// act [M, F] = silu(gate) * up; `both` [M, 2F] is working memory.
void mlp_in(const Linear& l, const float* x, float* both, float* act, int64_t M, int64_t F, int threads) {
    if (l.bias || F % NR) {
        multiply(l, x, both, M, false, threads);
        silu_mul(both, act, M, F, threads);
    } else {
        with_weights(l.weight, l.kind, [&](auto w) { gated(x, w, act, M, F, l.inputs, threads); });
    }
}

// Norm over every head of `heads` in rows of `stride`, in place.
void head_norm(float* x, const float* weight, int64_t tokens, int64_t stride, int64_t heads, int64_t D, float eps,
               int threads) {
    each_row(tokens, threads, [&](int64_t t) {
        float* row = x + t * stride;
        rms_norm(row, weight, row, heads, D, eps, 1);
    });
}

// Rows `index` of x [., width] to the front of `to`.
void gather(const float* x, const int64_t* index, int64_t count, int64_t width, float* to) {
    for (int64_t i = 0; i < count; i++) std::memcpy(to + i * width, x + index[i] * width, (size_t)width * 4);
}

}  // namespace

extern "C" {

// x [tokens, hidden] holds the embeddings and is overwritten; logits [wanted, vocabulary]. Returns 0, or 1 where a slot,
// table, length or index does not fit.
int tn_forward(const Decoder* d, const Batch* b, float* x, float* logits, int threads) {
    const int64_t T = b->tokens, H = d->hidden, Q = d->q_heads * d->D, KV = d->kv_heads * d->D, QKV = Q + 2 * KV;
    Shape s{b->rows, d->q_heads, d->kv_heads, d->D, b->block_size, d->count, 0, b->max_blocks, b->blocks, QKV};
    Rows single(b->rows, b->tables, b->start, b->context), longer = single;
    if (!single.readable(s)) return 1;
    for (int64_t t = 0; t < T; t++)
        if (b->slots[t] < 0 || b->slots[t] >= b->blocks * b->block_size) return 1;
    for (int64_t i = 0; i < b->wanted; i++)
        if (b->index[i] < 0 || b->index[i] >= T) return 1;
    const auto is_long = [&](int32_t r) { return b->invariant || longer.length(r) != 1; };
    single.chosen.erase(std::remove_if(single.chosen.begin(), single.chosen.end(), is_long), single.chosen.end());
    longer.chosen.erase(std::remove_if(longer.chosen.begin(), longer.chosen.end(), [&](int32_t r) { return !is_long(r); }),
                        longer.chosen.end());

    static thread_local Scratch kept;
    const int64_t wide = std::max(QKV, 2 * d->F);
    float* h = kept.at_least(T * (H + wide + std::max(Q, d->F)) + b->wanted * (H + Q));
    float *both = h + T * H, *inner = both + T * wide, *last_x = inner + T * std::max(Q, d->F);
    float *last_inner = last_x + b->wanted * H, *attended = inner;
    int64_t M = T;
    for (int64_t n = 0; n < d->count; n++) {
        const Layer& l = d->layers[n];
        rms_norm(x, l.attn_norm, h, M, H, d->eps, threads);
        multiply(l.qkv, h, both, M, false, threads);
        float *q = both, *k = both + Q, *v = k + KV;
        if (l.q_norm) head_norm(q, l.q_norm, M, QKV, d->q_heads, d->D, d->eps, threads);
        if (l.k_norm) head_norm(k, l.k_norm, M, QKV, d->kv_heads, d->D, d->eps, threads);
        s.layer = n;
        const RopeStore rope{M, d->q_heads, d->kv_heads, d->D, QKV, QKV, QKV, d->count, n, b->block_size, b->blocks};
        if (b->pool_bf16)
            rope_store(q, k, v, b->cosine, b->sine, (uint16_t*)b->pool, b->slots, rope, threads);
        else
            rope_store(q, k, v, b->cosine, b->sine, (float*)b->pool, b->slots, rope, threads);
        const bool last = n == d->count - 1;
        if (last && !b->wanted) return 0;
        if (!single.chosen.empty())
            attend_decode(q, b->pool, (int)b->pool_bf16, single, d->scale, inner, s, threads);
        if (!longer.chosen.empty())
            attend_prefill(q, b->pool, (int)b->pool_bf16, longer, d->scale, inner, s, threads);
        if (last) {  // beyond the last layer's KV only the wanted tokens matter
            M = b->wanted;
            gather(x, b->index, M, H, last_x);
            gather(inner, b->index, M, Q, last_inner);
            x = last_x, attended = last_inner;
        }
        multiply(l.o, attended, x, M, true, threads);
        rms_norm(x, l.mlp_norm, h, M, H, d->eps, threads);
        mlp_in(l.gate_up, h, both, inner, M, d->F, threads);
        multiply(l.down, inner, x, M, true, threads);
    }
    rms_norm(x, d->norm, h, M, H, d->eps, threads);
    multiply(d->head, h, logits, M, false, threads);
    return 0;
}
}
