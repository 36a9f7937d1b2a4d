// Attention over the paged pool [B, L, 2, Hkv, block, D], read through block tables.
//
// paged_decode: one query per row. Work items are (row, kv head, PART positions of context), so that two cores share
// even a single row; parts have a fixed length, hence a row's bits depend on its own context only.
//
// paged_prefill: ranges of queries, causal. Everything is held transposed: NR queries (tokens x heads of the group) are
// the lanes, keys and dimensions the rows. Softmax then runs down the rows without horizontal sums, K and V are read in
// the order in which they lie, and nothing is ever transposed except the queries, once. Key tiles start at multiples of
// KEYS from position 0 and a masked key adds an exact zero, so that a query's bits depend on its own prefix only: not on
// how the prefill was cut, nor on the rest of the batch.

#include "native_attention.h"

#include <algorithm>
#include <cstring>

#include "native.h"
#include "native_pool.h"

namespace {

constexpr int PART = 256;  // context positions of one decode work item
constexpr int KEYS = 64;   // key positions of one prefill tile
constexpr int LANES = 8 * NR;  // most queries x group heads that share one pass over the keys

// ---- decode ----------------------------------------------------------------------------------------------------

// scores[h * PART + t] = q[h] . keys[t] for `heads` (1..4) heads at once: each key is loaded once for all of them.
template <int heads, typename P>
void dot(const float* q, const P* keys, int64_t count, int64_t D, float* scores) {
    for (int64_t t = 0; t < count; t++) {
        vf acc[heads];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) acc[h] = vf{};
        const P* key = keys + t * D;
        int64_t d = 0;
        for (; d + W <= D; d += W) {
            const vf k = load(key + d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) acc[h] += k * load(q + h * D + d);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            float score = sum(acc[h]);
            for (int64_t i = d; i < D; i++) score += to_float(key[i]) * q[h * D + i];
            scores[h * PART + t] = score;
        }
    }
}

// out[h] += sum over t of p[h * PART + t] * values[t], for columns [0, width) of width = vectors * W.
template <int heads, int vectors, typename P>
INLINE void weigh(const float* p, const P* values, int64_t count, int64_t D, float* out) {
    vf acc[heads][vectors];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[h][j] = load(out + h * D + j * W);
    for (int64_t t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const vf v = load(values + t * D + j * W);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) acc[h][j] += v * splat(p[h * PART + t]);
        }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(out + h * D + j * W, acc[h][j]);
}

template <int heads, typename P>
void weighted(const float* p, const P* values, int64_t count, int64_t D, float* out) {
    int64_t d = 0;
    for (; d + 4 * W <= D; d += 4 * W) weigh<heads, 4>(p, values + d, count, D, out + d);
    for (; d + W <= D; d += W) weigh<heads, 1>(p, values + d, count, D, out + d);
    for (; d < D; d++)
        for (int h = 0; h < heads; h++)
            for (int64_t t = 0; t < count; t++) out[h * D + d] += p[h * PART + t] * to_float(values[t * D + d]);
}

// One part of one row's context for one kv head. Leaves for each head of the group: out[D] unnormalised, maximum, sum.
template <int heads, typename P>
void decode_part(const float* q, const P* pool, const int32_t* table, int64_t from, int64_t to, int64_t kv_head,
                 const Shape& s, float* out, float* maximum, float* total) {
    alignas(64) float scores[heads * PART] = {};
    const int64_t values = s.kv_heads * s.head(), size = s.block_size;
    for (int64_t t = from; t < to;) {
        const int64_t offset = t % size, count = std::min(size - offset, to - t);
        const P* keys = pool + s.keys(table[t / size], kv_head) + offset * s.D;
        // A block's keys and values are a few short runs, too short for the processor to see them coming: ask for this
        // block's values (read by the second loop below) and for the next block's keys.
        const P* next = t + count < to ? pool + s.keys(table[t / size + 1], kv_head) : keys;
        for (int64_t line = 0; line < count * s.D; line += 64 / (int64_t)sizeof(P)) {
            __builtin_prefetch(keys + values + line);
            __builtin_prefetch(next + line);
        }
        dot<heads>(q, keys, count, s.D, scores + (t - from));
        t += count;
    }
    for (int h = 0; h < heads; h++) {
        float* row = scores + h * PART;
        float top = row[0];
        for (int64_t t = 1; t < to - from; t++) top = std::max(top, row[t]);
        for (int64_t t = to - from; t % W; t++) row[t] = -INFINITY;
        vf added{};
        for (int64_t t = 0; t < to - from; t += W) {
            vf p = vexp(load(row + t) - top);
            added += p;
            store(row + t, p);
        }
        maximum[h] = top;
        total[h] = sum(added);
    }
    std::fill(out, out + heads * s.D, 0.0f);
    for (int64_t t = from; t < to;) {
        const int64_t offset = t % size, count = std::min(size - offset, to - t);
        weighted<heads>(scores + (t - from), pool + s.keys(table[t / size], kv_head) + values + offset * s.D, count,
                        s.D, out);
        t += count;
    }
}

template <typename Q, typename P>
void decode(const Q* q, const P* pool, const Rows& rows, float scale, Q* out, const Shape& s, int threads) {
    const int64_t G = s.group(), D = s.D, count = (int64_t)rows.chosen.size();
    std::vector<int64_t> first(count + 1, 0);  // cumulative parts
    for (int64_t n = 0; n < count; n++) first[n + 1] = first[n] + (rows.context[rows.chosen[n]] + PART - 1) / PART;
    const int64_t parts = first[count];
    static thread_local Scratch kept;
    float* partial = kept.at_least(parts * s.q_heads * (D + 2));
    float *maxima = partial + parts * s.q_heads * D, *totals = maxima + parts * s.q_heads;
    Pool::shared().run(parts * s.kv_heads, threads, [&](int64_t item) {
        static thread_local Scratch own;
        float* query = own.at_least(G * D);
        const int64_t part = item / s.kv_heads, kv_head = item % s.kv_heads;
        const int64_t n = std::upper_bound(first.begin(), first.end(), part) - first.begin() - 1, r = rows.chosen[n];
        const int64_t from = (part - first[n]) * PART, to = std::min<int64_t>(from + PART, rows.context[r]);
        widen(q + rows.token(r) * s.q_stride + kv_head * G * D, query, G * D);
        for (int64_t i = 0; i < G * D; i++) query[i] *= scale;
        const int64_t base = part * s.q_heads + kv_head * G;
        for (int64_t h = 0; h < G;) {
            const int64_t left = G - h, at = base + h;
            const int32_t* table = rows.tables + r * s.max_blocks;
            const float* some = query + h * D;
#define PART_OF(n) \
            decode_part<n>(some, pool, table, from, to, kv_head, s, partial + at * D, maxima + at, totals + at), h += n
            if (left == 1) PART_OF(1);
            else if (left == 2) PART_OF(2);
            else if (left == 3) PART_OF(3);
            else PART_OF(4);
#undef PART_OF
        }
    });
    Pool::shared().run(count, threads, [&](int64_t n) {
        static thread_local Scratch own;
        float* sums = own.at_least(D);
        Q* to = out + rows.token(rows.chosen[n]) * s.q_heads * D;
        for (int64_t h = 0; h < s.q_heads; h++) {
            float top = -INFINITY, total = 0;
            for (int64_t p = first[n]; p < first[n + 1]; p++) top = std::max(top, maxima[p * s.q_heads + h]);
            std::fill(sums, sums + D, 0.0f);
            for (int64_t p = first[n]; p < first[n + 1]; p++) {
                const float share = std::exp(maxima[p * s.q_heads + h] - top);
                total += share * totals[p * s.q_heads + h];
                for (int64_t d = 0; d < D; d++) sums[d] += share * partial[(p * s.q_heads + h) * D + d];
            }
            for (int64_t d = 0; d < D; d++) put(to + h * D + d, total > 0 ? sums[d] / total : 0.0f);
        }
    });
}

// ---- prefill ---------------------------------------------------------------------------------------------------

struct Item {
    int64_t row, kv_head, from, count;  // queries [from, from + count) of the row
};

// NR queries: their scores against one key tile, the running softmax, and their sums of values.
struct Panel {
    float *q, *out, *top, *total;  // [D, NR], [D, NR], [NR], [NR]
    int32_t position[NR];          // of each lane's query
    int64_t last;                  // the largest of them
};

void attend(Panel& panel, const float* keys, const float* values, int64_t first_key, int64_t count, int64_t D,
            float* scores) {
    tiles<false, false>(count, keys, D, panel.q, scores, D);
    for (int j = 0; j < NR; j += W) {
        vi position;
        std::memcpy(&position, panel.position + j, sizeof position);
        const bool masked = first_key + count - 1 > panel.position[0];  // lanes are in the order of their positions
        const vf before = load(panel.top + j);
        vf top = before;
        for (int64_t k = 0; k < count; k++) {
            vf score = load(scores + k * NR + j);
            if (masked) {
                score = position >= (int32_t)(first_key + k) ? score : splat(-INFINITY);
                store(scores + k * NR + j, score);
            }
            top = vmax(score, top);
        }
        const vf shrink = vexp(before - top);
        vf total = load(panel.total + j) * shrink;
        for (int64_t k = 0; k < count; k++) {
            const vf p = vexp(load(scores + k * NR + j) - top);
            total += p;
            store(scores + k * NR + j, p);
        }
        store(panel.top + j, top);
        store(panel.total + j, total);
        for (int64_t d = 0; d < D; d++) store(panel.out + d * NR + j, load(panel.out + d * NR + j) * shrink);
    }
    tiles<true, true>(D, values, D, scores, panel.out, count);
}

template <typename Q, typename P>
void prefill_item(const Item& item, const Q* q, const P* pool, const int32_t* table, int64_t position, float scale,
                  Q* out, const Shape& s, float* scratch) {
    const int64_t G = s.group(), D = s.D, lanes = item.count * G, panels = (lanes + NR - 1) / NR;
    float *keys = scratch, *values = keys + KEYS * D, *scores = values + KEYS * D, *next = scores + KEYS * NR;
    Panel panel[LANES / NR + 1] = {};
    const auto at = [&](int64_t lane, int64_t stride) { return lane / G * stride + (item.kv_head * G + lane % G) * D; };
    for (int64_t n = 0; n < panels; n++) {
        Panel& p = panel[n];
        p = {next, next + D * NR, next + 2 * D * NR, next + 2 * D * NR + NR, {}, 0};
        next += (2 * D + 2) * NR;
        std::fill(p.out, p.out + D * NR, 0.0f);
        for (int j = 0; j < NR; j++) {
            const int64_t lane = std::min(n * NR + j, lanes - 1);  // spare lanes repeat the last query
            p.position[j] = (int32_t)(position + lane / G);
            p.top[j] = -INFINITY;
            p.total[j] = 0;
            for (int64_t d = 0; d < D; d++) p.q[d * NR + j] = to_float(q[at(lane, s.q_stride) + d]) * scale;
        }
        p.last = p.position[NR - 1];
    }
    const int64_t visible = panel[panels - 1].last + 1, side = s.kv_heads * s.head();
    for (int64_t from = 0; from < visible; from += KEYS) {
        const int64_t count = std::min<int64_t>(KEYS, visible - from);
        for (int64_t t = from; t < from + count;) {
            const int64_t offset = t % s.block_size, some = std::min(s.block_size - offset, from + count - t);
            const P* k = pool + s.keys(table[t / s.block_size], item.kv_head) + offset * D;
            widen(k, keys + (t - from) * D, some * D);
            widen(k + side, values + (t - from) * D, some * D);
            t += some;
        }
        for (int64_t n = 0; n < panels; n++)
            if (panel[n].last >= from)
                attend(panel[n], keys, values, from, std::min(count, panel[n].last + 1 - from), D, scores);
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
        const Panel& p = panel[lane / NR];
        const int j = (int)(lane % NR);
        for (int64_t d = 0; d < D; d++) put(out + at(lane, s.q_heads * D) + d, p.out[d * NR + j] / p.total[j]);
    }
}

template <typename Q, typename P>
void prefill(const Q* q, const P* pool, const Rows& rows, float scale, Q* out, const Shape& s, int threads) {
    // Several items a thread even when there are few queries; otherwise as many lanes as share a pass over the keys.
    int64_t queries = 0;
    for (int32_t r : rows.chosen) queries += rows.length(r);
    const int64_t lanes = queries * s.group() * s.kv_heads / (4 * threads);
    const int64_t wanted = std::min<int64_t>(LANES, std::max<int64_t>(NR, lanes / NR * NR));
    const int64_t step = std::max<int64_t>(1, wanted / s.group());
    std::vector<Item> items;
    for (int32_t r : rows.chosen)
        for (int64_t from = 0; from < rows.length(r); from += step)
            for (int64_t h = 0; h < s.kv_heads; h++)
                items.push_back({r, h, from, std::min<int64_t>(step, rows.length(r) - from)});
    const auto work = [&](const Item& i) {  // the longest first, so that the threads finish together
        return i.count * (rows.context[i.row] - rows.length(i.row) + i.from + i.count);
    };
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
    const int64_t widest = std::max<int64_t>(step * s.group(), 1), panels = (widest + NR - 1) / NR;
    Pool::shared().run((int64_t)items.size(), threads, [&](int64_t i) {
        static thread_local Scratch own;
        float* scratch = own.at_least(2 * KEYS * s.D + KEYS * NR + panels * (2 * s.D + 2) * NR);
        const Item& item = items[i];
        const int64_t r = item.row, token = rows.token(r) + item.from;
        prefill_item(item, q + token * s.q_stride, pool, rows.tables + r * s.max_blocks,
                     rows.context[r] - rows.length(r) + item.from, scale, out + token * s.q_heads * s.D, s, scratch);
    });
}

}  // namespace

bool Rows::readable(const Shape& s) const {
    if (s.layer < 0 || s.layer >= s.layers || s.group() > LANES) return false;
    for (int32_t r : chosen) {
        if (context[r] < 0 || context[r] > s.max_blocks * s.block_size) return false;
        if (length(r) < 0 || (start && length(r) > context[r])) return false;
        for (int64_t b = 0; b * s.block_size < context[r]; b++) {
            const int32_t block = tables[r * s.max_blocks + b];
            if (block < 0 || block >= s.blocks) return false;
        }
    }
    return true;
}

void attend_decode(const float* q, const void* pool, int pool_bf16, const Rows& rows, float scale, float* out,
                   const Shape& s, int threads) {
    if (pool_bf16)
        decode(q, (const uint16_t*)pool, rows, scale, out, s, threads);
    else
        decode(q, (const float*)pool, rows, scale, out, s, threads);
}

void attend_prefill(const float* q, const void* pool, int pool_bf16, const Rows& rows, float scale, float* out,
                    const Shape& s, int threads) {
    if (pool_bf16)
        prefill(q, (const uint16_t*)pool, rows, scale, out, s, threads);
    else
        prefill(q, (const float*)pool, rows, scale, out, s, threads);
}

extern "C" {

// `shape` is a Shape, field by field. Both return 0, or 1 where a table, length or layer does not fit the pool.
int tn_paged_decode(const void* q, int bf16, const void* pool, int pool_bf16, const int32_t* tables,
                    const int32_t* context, float scale, void* out, const int64_t* shape, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    const Rows rows(s.rows, tables, nullptr, context);
    if (!rows.readable(s)) return 1;
    if (!bf16)
        attend_decode((const float*)q, pool, pool_bf16, rows, scale, (float*)out, s, threads);
    else if (pool_bf16)
        decode((const uint16_t*)q, (const uint16_t*)pool, rows, scale, (uint16_t*)out, s, threads);
    else
        decode((const uint16_t*)q, (const float*)pool, rows, scale, (uint16_t*)out, s, threads);
    return 0;
}

// `start` [rows + 1]: offsets of each row's queries in q.
int tn_paged_prefill(const void* q, int bf16, const void* pool, int pool_bf16, const int32_t* tables,
                     const int32_t* start, const int32_t* context, float scale, void* out, const int64_t* shape,
                     int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    const Rows rows(s.rows, tables, start, context);
    if (!rows.readable(s)) return 1;
    if (!bf16)
        attend_prefill((const float*)q, pool, pool_bf16, rows, scale, (float*)out, s, threads);
    else if (pool_bf16)
        prefill((const uint16_t*)q, (const uint16_t*)pool, rows, scale, (uint16_t*)out, s, threads);
    else
        prefill((const uint16_t*)q, (const float*)pool, rows, scale, (uint16_t*)out, s, threads);
    return 0;
}
}
