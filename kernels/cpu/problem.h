// What one call asks for, as plain pointers, strides and numbers: the only types that the binding and the kernels of
// every instruction set share. Strides count elements. Meanings of the options: kernels/reference.py.
#pragma once

#include <stdint.h>

namespace tcport_cpu {

enum class Dtype : int32_t { f64, f32, f16, bf16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, i8 };

inline int64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return 8;
    case Dtype::f32: return 4;
    case Dtype::f16:
    case Dtype::bf16: return 2;
    default: return 1;
  }
}

// [pages, page, KV heads, dim], K or V.
struct Cache {
  char* data;
  Dtype dtype;
  int64_t dim;
  int64_t page_stride, token_stride, head_stride, dim_stride;
};

// Scale of a stored element; strides of 0 where one number serves several pages, tokens or heads. data null: 1.
struct Scale {
  const char* data;
  Dtype dtype;
  int64_t page_stride, token_stride, head_stride;
  bool per_token() const { return page_stride != 0 || token_stride != 0; }
};

// [rows, heads, dim]: queries, new keys, new values.
struct Packed {
  const char* data;
  Dtype dtype;
  int64_t row_stride, head_stride, dim_stride;
};

struct Indices {
  const char* data;
  bool wide;  // int64, else int32
  int64_t row_stride, column_stride;
  int64_t at(int64_t row, int64_t column) const {
    int64_t i = row * row_stride + column * column_stride;
    return wide ? reinterpret_cast<const int64_t*>(data)[i] : reinterpret_cast<const int32_t*>(data)[i];
  }
};

struct Sequence {
  int64_t table_row;
  int64_t first_token;  // of the packed queries
  int64_t query_len;
  int64_t length;  // keys, those of the query tokens included
};

// Keys [begin, end) that a query at one position may see, before the mask.
struct Range {
  int64_t begin, end;
};

struct Tile {
  int64_t rows;         // packed rows (query tokens x heads of one KV head) of a task
  int64_t keys;         // keys of one block of the matrix kernel
  int64_t stream_rows;  // up to this many rows, keys are streamed past the rows instead of being packed
  int64_t stream_keys;  // keys of one block of the streaming kernel
  int64_t piece;        // keys of one task, where the rows are few
  int64_t heads;        // KV heads of one task, where the rows are few
};

struct Attention {
  Packed query;
  Cache k, v;
  Scale k_scale, v_scale;
  Indices table;
  int64_t num_pages, page_size;
  int64_t q_heads, kv_heads, group;
  const Sequence* sequences;

  float scale, softcap;
  bool causal;
  int64_t window, chunk;  // 0: none
  const float* slopes;    // [query heads] or null
  const float* sinks;     // [query heads] or null
  const uint8_t* mask;    // [tokens, columns] or null
  int64_t mask_columns, mask_row_stride, mask_column_stride;

  char* out;   // [tokens, query heads, v.dim], contiguous, in the query's dtype
  float* lse;  // [tokens, query heads], contiguous, or null
  Tile tile;
  float* partials;  // see Task::partial
};

// Rows [row_begin, row_end) of the sequence's packed rows (row = token * group + head of the group), for each of the KV
// heads, over keys [key_begin, key_end).
struct Task {
  int64_t sequence;
  int64_t row_begin, row_end;
  int64_t head_begin, head_end;
  int64_t key_begin, key_end;
  int64_t partial;  // offset into Attention::partials of the unfinished result, or -1: this task finishes the rows
  int64_t join;     // which Join counts this task, or -1
};

// The pieces of one set of rows, merged in order by whichever task finishes last.
struct Join {
  int64_t pieces;
  int64_t partial;  // offset of the first piece's result; the others follow
  int64_t done;     // tasks finished so far (atomic)
};

struct Write {
  Packed key, value;
  Cache k, v;
  Scale k_scale, v_scale;
  Indices slots;
  int64_t num_pages, page_size, kv_heads;
  bool bypass_cache;  // the rows written exceed the caches: store them past it
};

// The functions that exist once per instruction set.
struct Kernels {
  const char* name;
  int64_t (*scratch_floats)(const Attention&);
  int64_t (*partial_floats)(const Attention&, int64_t rows);  // of one head of one task
  void (*attend)(const Attention&, const Task&, float* scratch);
  void (*join)(const Attention&, const Task&, const Join&);
  void (*write)(const Write&, int64_t token_begin, int64_t token_end);
  void (*clear)(const Attention&, int64_t token);  // the result of a token that sees no key
  float (*value)(const char* data, Dtype, int64_t index);
};

// The page behind a table entry; an entry that names no page gives the nearest, so that no read leaves the cache.
inline int64_t page_at(const Attention& a, int64_t table_row, int64_t entry) {
  const int64_t page = a.table.at(table_row, entry);
  return page < 0 ? 0 : page < a.num_pages ? page : a.num_pages - 1;
}

// Keys that token `position` of a sequence of `length` keys may see. Queries may lie before the first key.
inline Range visible(const Attention& a, int64_t position, int64_t length) {
  Range range{0, length};
  if (a.causal && position + 1 < range.end) range.end = position + 1;
  if (a.window && position - a.window + 1 > range.begin) range.begin = position - a.window + 1;
  if (a.chunk) {
    int64_t chunk = position >= 0 ? position / a.chunk : -((-position - 1) / a.chunk) - 1;
    if (chunk < 0) return {0, 0};
    if (chunk * a.chunk > range.begin) range.begin = chunk * a.chunk;
    if (a.chunk < length && (chunk + 1) * a.chunk < range.end) range.end = (chunk + 1) * a.chunk;
  }
  if (a.mask && a.mask_columns < range.end) range.end = a.mask_columns;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

}  // namespace tcport_cpu
