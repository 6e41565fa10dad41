// The operators of the namespace tcport_cpu, against torch's stable ABI: what a tensor is ends here.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "run.h"

namespace tcport_cpu {
namespace {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

int32_t dtype_code(const Tensor& t) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

Dtype dtype_of(const Tensor& t, const char* name) {
  const int32_t code = dtype_code(t);
  if (code == aoti_torch_dtype_float32()) return Dtype::f32;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::bf16;
  if (code == aoti_torch_dtype_float16()) return Dtype::f16;
  if (code == aoti_torch_dtype_float64()) return Dtype::f64;
  if (code == aoti_torch_dtype_float8_e4m3fn()) return Dtype::e4m3;
  if (code == aoti_torch_dtype_float8_e5m2()) return Dtype::e5m2;
  if (code == aoti_torch_dtype_float8_e4m3fnuz()) return Dtype::e4m3fnuz;
  if (code == aoti_torch_dtype_float8_e5m2fnuz()) return Dtype::e5m2fnuz;
  STD_TORCH_CHECK(code == aoti_torch_dtype_int8(), "tcport_cpu: ", name, " has a dtype that no kernel reads");
  return Dtype::i8;
}

bool is_int64(const Tensor& t, const char* name) {
  const int32_t code = dtype_code(t);
  const bool wide = code == aoti_torch_dtype_int64();
  STD_TORCH_CHECK(wide || code == aoti_torch_dtype_int32(), "tcport_cpu: ", name, " must be int32 or int64");
  return wide;
}

char* data_of(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }

Cache cache_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 4, "tcport_cpu: ", name, " must be [pages, page, KV heads, head dim]");
  return {data_of(t), dtype_of(t, name), t.size(3), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

Packed packed_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3, "tcport_cpu: ", name, " must be [tokens, heads, head dim]");
  return {data_of(t), dtype_of(t, name), t.stride(0), t.stride(1), t.stride(2)};
}

Scale scale_of(const MaybeTensor& t, const char* name) {
  if (!t) return {nullptr, Dtype::f32, 0, 0, 0};
  const Dtype dtype = dtype_of(*t, name);
  if (t->dim() == 3) return {data_of(*t), dtype, t->stride(0), t->stride(1), t->stride(2)};
  return {data_of(*t), dtype, 0, 0, t->dim() == 1 && t->size(0) > 1 ? t->stride(0) : 0};
}

Indices indices_of(const Tensor& t, const char* name) {
  return {data_of(t), is_int64(t, name), t.stride(0), t.dim() > 1 ? t.stride(1) : 0};
}

// A [query heads] tensor as fp32 numbers.
std::vector<float> per_head(const MaybeTensor& t, const char* name) {
  std::vector<float> values;
  if (!t) return values;
  const Dtype dtype = dtype_of(*t, name);
  for (int64_t i = 0; i < t->size(0); i++) values.push_back(kernels().value(data_of(*t), dtype, i * t->stride(0)));
  return values;
}

Tensor empty(std::vector<int64_t> sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The sequences that have query tokens and keys. Throws where a length would lead outside a tensor.
std::vector<Sequence> sequences_of(const Tensor& lengths, const MaybeTensor& cumulative, int64_t tokens,
                                   int64_t max_length) {
  const Indices lens = indices_of(lengths, "seq_lens");
  Indices starts{};
  if (cumulative) starts = indices_of(*cumulative, "cu_seqlens_q");
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < lengths.size(0); b++) {
    const int64_t first = cumulative ? starts.at(b, 0) : b, end = cumulative ? starts.at(b + 1, 0) : b + 1;
    const int64_t length = lens.at(b, 0);
    if (end <= first || length <= 0) continue;
    if (first < 0 || end > tokens)
      throw std::runtime_error("cu_seqlens_q gives sequence " + std::to_string(b) + " the tokens from " +
                               std::to_string(first) + " to " + std::to_string(end) + ", and query has " +
                               std::to_string(tokens));
    if (length > max_length)
      throw std::runtime_error("seq_lens[" + std::to_string(b) + "] is " + std::to_string(length) +
                               ", and block_table has room for " + std::to_string(max_length) + " keys");
    sequences.push_back({b, first, end - first, length});
  }
  return sequences;
}

std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table, const Tensor& seq_lens,
    const MaybeTensor& cu_seqlens_q, double scale, bool causal, std::optional<int64_t> window, double softcap,
    const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
    const MaybeTensor& mask, std::optional<int64_t> chunk, std::optional<int64_t> num_splits, bool return_lse,
    int64_t rows, int64_t keys, int64_t stream_rows, int64_t stream_keys, int64_t piece) {
  STD_TORCH_CHECK(query.dim() == 3 && k_cache.dim() == 4 && v_cache.dim() == 4 && block_table.dim() == 2 &&
                      query.size(2) == k_cache.size(3) && query.size(1) % k_cache.size(2) == 0 &&
                      k_cache.size(2) == v_cache.size(2) && rows <= 256 && keys <= 256 && stream_keys <= 256 &&
                      stream_rows <= 256 && piece > 0,
                  "tcport_cpu::paged_attention takes arguments that tcport::paged_attention has checked: call that");
  const int64_t tokens = query.size(0), q_heads = query.size(1), v_dim = v_cache.size(3);
  Tensor out = empty({tokens, q_heads, v_dim}, dtype_code(query));
  Tensor lse = return_lse ? empty({tokens, q_heads}, aoti_torch_dtype_float32()) : empty({0}, aoti_torch_dtype_float32());

  Attention a{};
  a.query = packed_of(query, "query");
  a.k = cache_of(k_cache, "k_cache");
  a.v = cache_of(v_cache, "v_cache");
  a.k_scale = scale_of(k_scale, "k_scale");
  a.v_scale = scale_of(v_scale, "v_scale");
  a.table = indices_of(block_table, "block_table");
  a.num_pages = k_cache.size(0);
  a.page_size = k_cache.size(1);
  a.q_heads = q_heads;
  a.kv_heads = k_cache.size(2);
  a.group = q_heads / a.kv_heads;
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  a.causal = causal;
  constexpr int64_t FAR = int64_t{1} << 62;
  a.window = std::min(window.value_or(0), FAR);
  a.chunk = std::min(chunk.value_or(0), FAR);
  const std::vector<float> slopes = per_head(alibi_slopes, "alibi_slopes"), sink_logits = per_head(sinks, "sinks");
  a.slopes = alibi_slopes ? slopes.data() : nullptr;
  a.sinks = sinks ? sink_logits.data() : nullptr;
  if (mask) {
    static const uint8_t nothing = 0;  // a mask without columns has no memory, and hides everything all the same
    a.mask = mask->numel() ? reinterpret_cast<const uint8_t*>(data_of(*mask)) : &nothing;
    a.mask_columns = mask->size(1);
    a.mask_row_stride = mask->stride(0);
    a.mask_column_stride = mask->stride(1);
  }
  a.out = data_of(out);
  a.lse = return_lse ? reinterpret_cast<float*>(data_of(lse)) : nullptr;
  a.tile = {rows, keys, stream_rows, stream_keys, piece, 1};

  const std::vector<Sequence> sequences =
      sequences_of(seq_lens, cu_seqlens_q, tokens, block_table.size(1) * a.page_size);
  run_attention(a, sequences, tokens, num_splits.value_or(0));
  return {out, lse};
}

void kv_write(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slot_mapping, const MaybeTensor& k_scale, const MaybeTensor& v_scale) {
  Write w{};
  w.key = packed_of(key, "key");
  w.value = packed_of(value, "value");
  w.k = cache_of(k_cache, "k_cache");
  w.v = cache_of(v_cache, "v_cache");
  w.k_scale = scale_of(k_scale, "k_scale");
  w.v_scale = scale_of(v_scale, "v_scale");
  w.slots = indices_of(slot_mapping, "slot_mapping");
  w.num_pages = k_cache.size(0);
  w.page_size = k_cache.size(1);
  w.kv_heads = k_cache.size(2);
  run_write(w, slot_mapping.size(0));
}

}  // namespace
}  // namespace tcport_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(tcport_cpu, m) {
  m.def(
      "paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor? cu_seqlens_q, float scale, bool causal, int? window, float softcap, Tensor? alibi_slopes, Tensor? sinks, "
      "Tensor? k_scale, Tensor? v_scale, Tensor? mask, int? chunk, int? num_splits, bool return_lse, int rows, int keys, "
      "int stream_rows, int stream_keys, int piece) -> (Tensor out, Tensor lse)");
  m.def(
      "kv_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
      "Tensor? k_scale, Tensor? v_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tcport_cpu, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&tcport_cpu::paged_attention));
  m.impl("kv_write", TORCH_BOX(&tcport_cpu::kv_write));
}

extern "C" __attribute__((visibility("default"))) const char* tcport_cpu_isa() { return tcport_cpu::kernels().name; }

extern "C" __attribute__((visibility("default"))) bool tcport_cpu_select(const char* isa) {
  return tcport_cpu::select_kernels(isa);
}
