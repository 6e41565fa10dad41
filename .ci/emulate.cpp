// The kernels of one instruction set (TCPORT_ISA) against attention in fp64, without torch: for processors that the tests
// do not run on, under an emulator. Prints what is wrong, and ends with the number of wrong cases.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "plan.h"

namespace tcport_cpu::TCPORT_ISA { extern const Kernels kernels; }

using namespace tcport_cpu;

namespace {

std::mt19937 random_bits(20);

int below(int limit) { return static_cast<int>(random_bits() % static_cast<unsigned>(limit)); }

// Codes of a float of so many bits, of magnitudes from 1/8 to 2, and what they mean.
struct Format {
  Dtype dtype;
  int exponent_bits, mantissa_bits;
  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  uint32_t random_code() const {
    if (dtype == Dtype::i8) return static_cast<uint32_t>(below(256));
    const int exponent = (1 << (exponent_bits - 1)) - 1 - below(4);
    return static_cast<uint32_t>(below(2)) << (bits() - 1) | static_cast<uint32_t>(exponent) << mantissa_bits |
           (random_bits() & ((1u << mantissa_bits) - 1));
  }
  double value(uint32_t code) const {
    if (dtype == Dtype::i8) return static_cast<int8_t>(code);
    const int exponent = static_cast<int>(code >> mantissa_bits & ((1u << exponent_bits) - 1));
    const double mantissa = 1 + (code & ((1u << mantissa_bits) - 1)) / std::ldexp(1.0, mantissa_bits);
    return (code >> (bits() - 1) ? -1 : 1) * std::ldexp(mantissa, exponent - (1 << (exponent_bits - 1)) + 1);
  }
};

constexpr Format F32{Dtype::f32, 8, 23}, F16{Dtype::f16, 5, 10}, BF16{Dtype::bf16, 8, 7}, E4M3{Dtype::e4m3, 4, 3},
    E5M2{Dtype::e5m2, 5, 2}, I8{Dtype::i8, 0, 0};

struct Array {
  std::vector<char> data;
  std::vector<double> values;
  Array(Format format, int64_t size) {
    const auto width = static_cast<size_t>(size_of(format.dtype));
    data.resize(static_cast<size_t>(size) * width);
    for (size_t i = 0; i < static_cast<size_t>(size); i++) {
      const uint32_t code = format.random_code();
      __builtin_memcpy(&data[i * width], &code, width);
      values.push_back(format.value(code));
    }
  }
  double at(int64_t i) const { return values[static_cast<size_t>(i)]; }
};

struct Case {
  Format query, cache;
  int dim, v_dim, group;
  bool head_major;
  int query_len, window;
  double softcap;
};

int64_t offset(const Cache& c, int64_t page, int64_t slot, int64_t head, int64_t d) {
  return page * c.page_stride + slot * c.token_stride + head * c.head_stride + d * c.dim_stride;
}

// The largest error over all elements, relative to the largest value.
double error_of(const Case& c) {
  constexpr int PAGE = 16, KV_HEADS = 2;
  const std::vector<int> lengths = {1, 40, 530};
  const int heads = KV_HEADS * c.group;
  std::vector<Sequence> sequences;
  int64_t tokens = 0, columns = (lengths.back() + PAGE - 1) / PAGE, pages = 0;
  for (int length : lengths) {
    const int query_len = c.query_len < length ? c.query_len : length;
    sequences.push_back({static_cast<int64_t>(sequences.size()), tokens, query_len, length});
    tokens += query_len;
    pages += (length + PAGE - 1) / PAGE;
  }
  std::vector<int32_t> table(sequences.size() * static_cast<size_t>(columns));
  for (int32_t& page : table) page = below(static_cast<int>(pages));  // one used twice is read just as well
  Array query(c.query, tokens * heads * c.dim), keys(c.cache, pages * PAGE * KV_HEADS * c.dim),
      values(c.cache, pages * PAGE * KV_HEADS * c.v_dim);
  std::vector<char> out(static_cast<size_t>(tokens * heads * c.v_dim * size_of(c.query.dtype)));
  std::vector<float> lse(static_cast<size_t>(tokens * heads));

  Attention a{};
  a.query = {query.data.data(), c.query.dtype, heads * c.dim, c.dim, 1};
  auto cache = [&](Array& array, int64_t dim) -> Cache {
    const int64_t token = c.head_major ? dim : KV_HEADS * dim, head = c.head_major ? PAGE * dim : dim;
    return {array.data.data(), c.cache.dtype, dim, PAGE * KV_HEADS * dim, token, head, 1};
  };
  a.k = cache(keys, c.dim);
  a.v = cache(values, c.v_dim);
  a.table = {reinterpret_cast<const char*>(table.data()), false, columns, 1};
  a.num_pages = pages;
  a.page_size = PAGE;
  a.q_heads = heads;
  a.kv_heads = KV_HEADS;
  a.group = c.group;
  a.scale = static_cast<float>((c.cache.dtype == Dtype::i8 ? 0.01 : 1) / std::sqrt(c.dim));
  a.softcap = static_cast<float>(c.softcap);
  a.causal = true;
  a.window = c.window;
  a.out = out.data();
  a.lse = lse.data();
  a.tile = {64, 64, 8, 32, 512, 1};
  a.sequences = sequences.data();

  const Kernels& kernels = TCPORT_ISA::kernels;
  Plan plan = plan_tasks(a, sequences, 0, 2, kernels);
  std::vector<float> partials(static_cast<size_t>(plan.partial_floats + 16));
  a.partials = partials.data();
  auto* scratch = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(kernels.scratch_floats(a) + 16) / 16 * 64));
  for (const Task& task : plan.tasks) {
    kernels.attend(a, task, scratch);
    if (task.join < 0) continue;
    Join& join = plan.joins[static_cast<size_t>(task.join)];
    if (++join.done == join.pieces) kernels.join(a, task, join);
  }
  std::free(scratch);

  double worst = 0, largest = 0;
  for (const Sequence& s : sequences)
    for (int64_t i = 0; i < s.query_len; i++)
      for (int64_t head = 0; head < heads; head++) {
        const int64_t token = s.first_token + i, position = s.length - s.query_len + i, kv = head / c.group;
        const Range seen = visible(a, position, s.length);
        std::vector<double> weights, expected(static_cast<size_t>(c.v_dim));
        double total = 0;
        auto where = [&](const Cache& cache, int64_t key, int64_t d) {
          return offset(cache, a.table.at(s.table_row, key / PAGE), key % PAGE, kv, d);
        };
        for (int64_t key = seen.begin; key < seen.end; key++) {
          double dot = 0;
          for (int64_t d = 0; d < c.dim; d++)
            dot += query.at((token * heads + head) * c.dim + d) * keys.at(where(a.k, key, d));
          dot *= a.scale;
          if (c.softcap != 0) dot = std::tanh(dot / c.softcap) * c.softcap;
          weights.push_back(std::exp(dot));
          total += weights.back();
        }
        for (int64_t key = seen.begin; key < seen.end; key++)
          for (int64_t d = 0; d < c.v_dim; d++)
            expected[static_cast<size_t>(d)] +=
                weights[static_cast<size_t>(key - seen.begin)] / total * values.at(where(a.v, key, d));
        for (int64_t d = 0; d < c.v_dim; d++) {
          uint32_t code = 0;
          const auto width = static_cast<size_t>(size_of(c.query.dtype));
          __builtin_memcpy(&code, &out[static_cast<size_t>((token * heads + head) * c.v_dim + d) * width], width);
          const double got = code << 1 << (32 - c.query.bits()) ? c.query.value(code) : 0;  // 0 is no normal number
          worst = std::fmax(worst, std::isfinite(got) ? std::fabs(got - expected[static_cast<size_t>(d)]) : INFINITY);
          largest = std::fmax(largest, std::fabs(expected[static_cast<size_t>(d)]));
        }
        const double lse_error = std::fabs(lse[static_cast<size_t>(token * heads + head)] - std::log(total));
        worst = std::fmax(worst, lse_error <= 2e-2 ? 0 : INFINITY);
      }
  return worst / largest;
}

}  // namespace

int main() {
  int wrong = 0, count = 0;
  for (Format query : {F32, BF16, F16})
    for (Format cache : {query, E4M3, E5M2, I8})
      for (auto [dim, v_dim] : {std::pair{64, 64}, {128, 128}, {40, 72}, {96, 32}})
        for (int query_len : {1, 3, 20})
          for (bool head_major : {false, true}) {
            const int group = 1 + below(5), window = below(3) ? 0 : 40;
            const Case c{query, cache, dim, v_dim, group, head_major, query_len, window, below(3) ? 0 : 1.5};
            const double error = error_of(c), allowed = query.dtype == Dtype::f32 ? 1e-5 : 1e-2;
            count++;
            if (error <= allowed) continue;
            wrong++;
            std::printf("query %d cache %d dims %d, %d group %d head-major %d queries %d window %d softcap %.1f: off by %g\n",
                        static_cast<int>(query.dtype), static_cast<int>(cache.dtype), dim, v_dim, group, head_major,
                        query_len, window, c.softcap, error);
          }
  std::printf("%s: %d of %d cases wrong\n", TCPORT_ISA::kernels.name, wrong, count);
  return wrong != 0;
}
