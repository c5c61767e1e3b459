// Decode-time kernels for a feed-forward block of which only some channels are computed:
//
//     y = bd + sum over kept channels i of  act(x . Wg[i] + bg[i]) * (x . Wu[i] + bu[i]) * WdT[i]
//
// For a few rows of x (1 to 8, say) the time goes into reading weights, so the speed-up over the
// dense block comes to the ratio of bytes read, provided that
//   * the weights stay where they are, and a kept row is read once, however many rows x has;
//   * rows are prefetched by address: the hardware's prefetchers stop at the end of a 4 KiB page,
//     and run on into rows that are not wanted;
//   * what else is done per token (activation, scores, selection) stays in the same call.
// The down projection is stored transposed, [h, d]: a channel is a contiguous row there too.
//
// The result does not depend on the number of threads: sums are cut into blocks by sizes alone.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Sums are kept in float for bf16, fp16 and fp32 weights, in double for fp64.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- Vector code -------------------------------------------------------------------------------
// Written once with the compiler's generic vectors of `Bytes` bytes, and compiled for several
// instruction sets by being inlined into functions with a `target` attribute.

#define SP_INLINE __attribute__((always_inline)) inline

// Loads 16-bit words into the upper halves of 32-bit lanes. Spelled out for each size, because GCC
// 12 rejects vector builtins on types that depend on a template parameter; a shuffle with zeros,
// because its 64-byte __builtin_convertvector takes five instructions instead of two.
template <int Bytes>
struct Words;
#define SP_WORDS(BYTES, ...)                                          \
  template <>                                                         \
  struct Words<BYTES> {                                               \
    typedef uint16_t u16 __attribute__((vector_size((BYTES) / 2)));   \
    typedef uint32_t u32 __attribute__((vector_size(BYTES)));         \
    static SP_INLINE u32 load(const void* p) {                        \
      u16 words, zeros = {};                                          \
      std::memcpy(&words, p, sizeof words);                           \
      return (u32)__builtin_shufflevector(zeros, words, __VA_ARGS__); \
    }                                                                 \
  };
SP_WORDS(16, 0, 4, 1, 5, 2, 6, 3, 7)
SP_WORDS(32, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
SP_WORDS(64, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27,
         12, 28, 13, 29, 14, 30, 15, 31)

template <typename A, int Bytes>
struct Vec {
  static constexpr int N = Bytes / sizeof(A);
  typedef A type __attribute__((vector_size(Bytes)));
  using Bits = Words<Bytes>;

  static SP_INLINE type load(const A* p) {
    type v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static SP_INLINE type load(const c10::BFloat16* p) {  // the upper half of a float
    typename Bits::u32 bits = Bits::load(p);
    type v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static SP_INLINE type load(const c10::Half* p) {
    // Move exponent and mantissa into place and correct the exponent's bias by a multiplication,
    // exact for subnormal values as well; infinities and NaNs need their exponent filled.
    typename Bits::u32 half = Bits::load(p) >> 16, magnitude = half & 0x7fff;
    typename Bits::u32 bits = magnitude << 13;
    type v;
    std::memcpy(&v, &bits, sizeof v);
    v *= 0x1p112f;
    std::memcpy(&bits, &v, sizeof v);
    bits |= (typename Bits::u32)(magnitude > 0x7bff) & 0x7f800000;
    bits |= (half & 0x8000) << 16;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static SP_INLINE void store(A* p, type v) { std::memcpy(p, &v, sizeof v); }
  static SP_INLINE A sum(type v) {
    if constexpr (Bytes > 16) {  // fold the upper half onto the lower one
      typename Vec<A, Bytes / 2>::type half[2];
      std::memcpy(half, &v, sizeof v);
      return Vec<A, Bytes / 2>::sum(half[0] + half[1]);
    } else if constexpr (N == 4) {
      return (v[0] + v[2]) + (v[1] + v[3]);
    } else {
      return v[0] + v[1];
    }
  }
};

// Four weight rows at a time: independent sums hide latency, and a load of x (or of the running
// output) serves four rows. `next` are the four after them, null if nothing is to be prefetched.
constexpr int kStreams = 4;
template <typename T>
using Quad = const T* const*;

// Prefetches what is wanted half a KiB later: further on in the rows at hand, then in the next.
// Much further ahead, four rows of 8 KiB would push everything else out of the first-level cache.
template <typename T>
SP_INLINE void prefetch(Quad<T> w, Quad<T> next, int64_t k, int64_t d) {
  const int64_t later = k + std::min<int64_t>(512 / sizeof(T), d);
  for (int s = 0; next && s < kStreams; ++s)
    __builtin_prefetch(later < d ? w[s] + later : next[s] + (later - d), 0, 3);
}

// out[r * kStreams + s] = weights[s] . x[r]  for `Rows` rows of x.
template <int Bytes, int Rows, typename T, typename A>
SP_INLINE void dot_rows(Quad<T> weights, Quad<T> next, const A* x, int64_t ldx, int64_t d, A* out) {
  using V = Vec<A, Bytes>;
  constexpr int kLine = 64 / sizeof(T);
  const T* const w[kStreams] = {weights[0], weights[1], weights[2], weights[3]};
  typename V::type sums[Rows][kStreams];
  for (auto& row : sums)
    for (auto& sum : row) sum = typename V::type{};
  int64_t k = 0;
  for (; k + kLine <= d; k += kLine) {
    prefetch<T>(w, next, k, d);
    for (int j = 0; j < kLine; j += V::N) {
      typename V::type wv[kStreams];
      for (int s = 0; s < kStreams; ++s) wv[s] = V::load(w[s] + k + j);
      for (int r = 0; r < Rows; ++r) {
        typename V::type xv = V::load(x + r * ldx + k + j);
        for (int s = 0; s < kStreams; ++s) sums[r][s] += wv[s] * xv;
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int s = 0; s < kStreams; ++s) {
      A total = V::sum(sums[r][s]);
      for (int64_t t = k; t < d; ++t) total += A(w[s][t]) * x[r * ldx + t];
      out[r * kStreams + s] = total;
    }
}

// y[r * ld + k] += sum over s of h[r * kStreams + s] * weights[s][k]  for k < d.
template <int Bytes, typename T, typename A>
SP_INLINE void add_rows(Quad<T> weights, Quad<T> next, const A* h, int64_t rows, int64_t d, A* y,
                        int64_t ld) {
  using V = Vec<A, Bytes>;
  constexpr int kLine = 64 / sizeof(T);
  const T* const w[kStreams] = {weights[0], weights[1], weights[2], weights[3]};
  int64_t k = 0;
  for (; k + kLine <= d; k += kLine) {
    prefetch<T>(w, next, k, d);
    for (int j = 0; j < kLine; j += V::N) {
      typename V::type wv[kStreams];
      for (int s = 0; s < kStreams; ++s) wv[s] = V::load(w[s] + k + j);
      for (int64_t r = 0; r < rows; ++r) {
        typename V::type yv = V::load(y + r * ld + k + j);
        for (int s = 0; s < kStreams; ++s) yv += wv[s] * h[r * kStreams + s];
        V::store(y + r * ld + k + j, yv);
      }
    }
  }
  for (; k < d; ++k)
    for (int64_t r = 0; r < rows; ++r)
      for (int s = 0; s < kStreams; ++s) y[r * ld + k] += A(w[s][k]) * h[r * kStreams + s];
}

template <typename T>
struct Kernels {
  using A = acc_t<T>;
  // For 1, 2 and 4 rows of x. x comes as given and in the type of the sums: a kernel reads one.
  void (*dot[3])(Quad<T> w, Quad<T> next, const T* x_raw, const A* x, int64_t ldx, int64_t d,
                 A* out);
  void (*add)(Quad<T> w, Quad<T> next, const A* h, int64_t rows, int64_t d, A* y, int64_t ld);
};

#define SP_KERNELS(NAME, BYTES, TARGET)                                                         \
  template <int Rows, typename T, typename A>                                                   \
  TARGET void dot_##NAME(Quad<T> w, Quad<T> next, const T*, const A* x, int64_t ldx, int64_t d, \
                         A* out) {                                                              \
    dot_rows<BYTES, Rows, T>(w, next, x, ldx, d, out);                                          \
  }                                                                                             \
  template <typename T, typename A>                                                             \
  TARGET void add_##NAME(Quad<T> w, Quad<T> next, const A* h, int64_t rows, int64_t d, A* y,    \
                         int64_t ld) {                                                          \
    add_rows<BYTES, T>(w, next, h, rows, d, y, ld);                                             \
  }                                                                                             \
  template <typename T, typename A = acc_t<T>>                                                  \
  Kernels<T> kernels_##NAME() {                                                                 \
    return {{dot_##NAME<1, T, A>, dot_##NAME<2, T, A>, dot_##NAME<4, T, A>}, add_##NAME<T, A>}; \
  }

SP_KERNELS(plain, 16, )
#if defined(__x86_64__)
#define SP_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
SP_KERNELS(avx2, 32, __attribute__((target("avx2,fma"))))
SP_KERNELS(avx512, 64, __attribute__((target(SP_AVX512))))

// bf16 has a dot product instruction of its own, which needs no conversions.
template <int Rows>
__attribute__((target(SP_AVX512 ",avx512bf16"))) void dot_avx512_bf16(
    Quad<c10::BFloat16> weights, Quad<c10::BFloat16> next, const c10::BFloat16* x, const float*,
    int64_t ldx, int64_t d, float* out) {
  const c10::BFloat16* const w[kStreams] = {weights[0], weights[1], weights[2], weights[3]};
  __m512 sums[Rows][kStreams];
  for (auto& row : sums)
    for (auto& sum : row) sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < d; k += 32) {
    prefetch<c10::BFloat16>(w, next, k, d);
    const __mmask32 inside = d - k >= 32 ? ~__mmask32(0) : (__mmask32(1) << (d - k)) - 1;
    __m512bh wv[kStreams];
    for (int s = 0; s < kStreams; ++s)
      wv[s] = (__m512bh)_mm512_maskz_loadu_epi16(inside, w[s] + k);
    for (int r = 0; r < Rows; ++r) {
      const __m512bh xv = (__m512bh)_mm512_maskz_loadu_epi16(inside, x + r * ldx + k);
      for (int s = 0; s < kStreams; ++s) sums[r][s] = _mm512_dpbf16_ps(sums[r][s], wv[s], xv);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int s = 0; s < kStreams; ++s) out[r * kStreams + s] = _mm512_reduce_add_ps(sums[r][s]);
}
#endif

// 0: best the processor has, 1: at most AVX-512 without bf16, 2: at most AVX2, 3: baseline.
// For tests of the fallbacks only.
std::atomic<int64_t> isa_limit{0};

template <typename T>
Kernels<T> pick_kernels() {
#if defined(__x86_64__)
  const int64_t limit = isa_limit;
  if (limit < 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    auto kernels = kernels_avx512<T>();
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (limit < 1 && __builtin_cpu_supports("avx512bf16"))
        kernels = {{dot_avx512_bf16<1>, dot_avx512_bf16<2>, dot_avx512_bf16<4>}, kernels.add};
    return kernels;
  }
  if (limit < 3 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return kernels_avx2<T>();
#endif
  return kernels_plain<T>();
}

// ---- Projections -------------------------------------------------------------------------------

// Runs f(block) for every block. Threads take blocks as they come free: with an even split, one
// busy core would hold up the whole step.
template <typename F>
void for_blocks(int64_t blocks, const F& f) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(blocks, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) f(b);
  });
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A little more than d from row to row: at a distance of some power of two, the rows of x (or y)
// would fall into the same few lines of the first-level cache.
int64_t row_stride(int64_t d) { return d + 32; }

// The rows of x, as given and in the type of the sums.
template <typename T>
struct Input {
  int64_t rows, d, ld;
  std::vector<T> raw;
  std::vector<acc_t<T>> wide;
  explicit Input(const at::Tensor& x)
      : rows(x.size(0)), d(x.size(1)), ld(row_stride(d)), raw(rows * ld) {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(x.const_data_ptr<T>() + r * d, d, &raw[r * ld]);
    wide.assign(raw.begin(), raw.end());
  }
};

// Dot products of all rows of x with rows channel(0) .. channel(count - 1) of M matrices (gate and
// up, or one of them); done(position, row, values) receives the M values of a position.
template <typename T, size_t M, typename Channel, typename Done>
void project(const T* const (&mats)[M], int64_t count, const Channel& channel, const Input<T>& x,
             const Done& done) {
  constexpr int64_t kStep = kStreams / M;
  const auto kernels = pick_kernels<T>();
  const int64_t rows = x.rows, d = x.d, ld = x.ld;
  // Prefetching stops at the end of a block, so blocks must not be too small.
  const int64_t size = divide_up(std::max<int64_t>(divide_up(count, 16), 16), kStep) * kStep;
  for_blocks(divide_up(count, size), [&](int64_t block) {
    const int64_t begin = block * size, end = std::min(count, begin + size);
    std::vector<acc_t<T>> out(rows * kStreams);
    const T *w[kStreams], *next[kStreams];
    for (int64_t p = begin; p < end; p += kStep) {
      for (int64_t i = 0; i < kStep; ++i)
        for (size_t m = 0; m < M; ++m) {
          w[i * M + m] = mats[m] + channel(std::min(p + i, end - 1)) * d;
          next[i * M + m] = mats[m] + channel(std::min(p + i + kStep, end - 1)) * d;
        }
      for (int64_t r = 0, some; r < rows; r += some) {
        some = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        // After the first pass the weights are in the first-level cache.
        kernels.dot[some / 2](w, r == 0 ? next : nullptr, &x.raw[r * ld], &x.wide[r * ld], ld, d,
                              &out[r * kStreams]);
      }
      for (int64_t i = 0; i < std::min(kStep, end - p); ++i)
        for (int64_t r = 0; r < rows; ++r) done(p + i, r, &out[r * kStreams + i * M]);
    }
  });
}

// y[r] = bias + sum over p in `active` of h[r * n + p] * w_t[channels(p)].
template <typename T, typename Channel>
void down_project(const T* w_t, const T* bias, const std::vector<int32_t>& active,
                  const Channel& channels, const acc_t<T>* h, int64_t n, int64_t rows, int64_t d,
                  T* y) {
  using A = acc_t<T>;
  const auto kernels = pick_kernels<T>();
  const int64_t count = active.size(), ld = row_stride(d);
  // Every block sums into an output of its own; these are added up at the end.
  const int64_t blocks = std::clamp<int64_t>(count * d * sizeof(T) / (128 << 10), 1, 16);
  const int64_t size = divide_up(divide_up(count, blocks), kStreams) * kStreams;
  const at::Tensor sums = at::empty({blocks, rows, ld}, c10::CppTypeToScalarType<A>::value);
  A* const partial = sums.mutable_data_ptr<A>();
  const std::vector<T> zeros(d);  // in place of missing rows: an infinite weight times 0 is NaN
  for_blocks(blocks, [&](int64_t block) {
    const int64_t begin = block * size, end = std::min(count, begin + size);
    A* out = partial + block * rows * ld;
    std::fill(out, out + rows * ld, A(0));
    std::vector<A> factors(rows * kStreams);
    const T *w[kStreams], *next[kStreams];
    for (int64_t p = begin; p < end; p += kStreams) {
      for (int64_t s = 0; s < kStreams; ++s) {
        const bool inside = p + s < end;
        w[s] = inside ? w_t + channels(active[p + s]) * d : zeros.data();
        next[s] = w_t + channels(active[std::min(p + kStreams + s, end - 1)]) * d;
        for (int64_t r = 0; r < rows; ++r)
          factors[r * kStreams + s] = inside ? h[r * n + active[p + s]] : A(0);
      }
      kernels.add(w, next, factors.data(), rows, d, out, ld);
    }
  });
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < d; ++k) {
      A total = bias ? A(bias[k]) : A(0);
      for (int64_t b = 0; b < blocks; ++b) total += partial[(b * rows + r) * ld + k];
      y[r * d + k] = T(total);
    }
}

// ---- Activation and selection ------------------------------------------------------------------

enum class Act { silu, gelu, gelu_tanh, relu };

Act parse_act(c10::string_view name) {
  if (name == "silu") return Act::silu;
  if (name == "gelu") return Act::gelu;
  if (name == "gelu_tanh") return Act::gelu_tanh;
  if (name == "relu") return Act::relu;
  TORCH_CHECK(false, "unknown activation '", name, "': expected silu, gelu, gelu_tanh or relu");
}

template <typename A>
A activate(Act act, A v) {
  constexpr A kRootHalf = M_SQRT1_2, kRoot2OverPi = M_2_SQRTPI * M_SQRT1_2;
  switch (act) {
    case Act::silu: return v / (A(1) + std::exp(-v));
    case Act::gelu: return A(0.5) * v * (A(1) + std::erf(v * kRootHalf));
    case Act::gelu_tanh:
      return A(0.5) * v * (A(1) + std::tanh(kRoot2OverPi * (v + A(0.044715) * v * v * v)));
    default: return v < A(0) ? A(0) : v;  // lets NaN through
  }
}

// A candidate, ordered best first; of equal scores, the lower position. For a score >= 0 the order
// of the bits is the order of the values. NaN goes before infinity: the dense block would let it
// through, and so must the pruned one.
template <typename A>
struct Ranked {
  std::conditional_t<sizeof(A) == 4, uint32_t, uint64_t> key;
  int32_t position;
  Ranked() = default;
  Ranked(A score, int32_t p) : position(p) {
    score = std::abs(score);
    std::memcpy(&key, &score, sizeof key);
    if (std::isnan(score)) key = ~decltype(key)(0);
  }
  bool operator<(const Ranked& o) const {
    return key != o.key ? key > o.key : position < o.position;
  }
};

// ---- Arguments ---------------------------------------------------------------------------------

using at::Tensor;
using OptTensor = std::optional<Tensor>;

void check(const OptTensor& t, at::ScalarType dtype, at::IntArrayRef sizes, const char* name) {
  if (!t.has_value()) return;
  TORCH_CHECK(t->is_cpu() && t->scalar_type() == dtype && t->sizes() == sizes && t->is_contiguous(),
              name, " must be a contiguous CPU tensor of shape ", sizes, " and type ", dtype,
              ", but has shape ", t->sizes(), ", strides ", t->strides(), " and type ", t->dtype());
}

template <typename T>
const T* ptr(const OptTensor& t) {
  return t.has_value() ? t->const_data_ptr<T>() : nullptr;
}

// The entries of an int32 list, all of which must lie in 0 .. below - 1.
const int32_t* checked_list(const OptTensor& list, int64_t below, const char* name) {
  if (!list.has_value()) return nullptr;
  check(list, at::kInt, {list->numel()}, name);
  const int32_t* p = ptr<int32_t>(list);
  bool inside = true;
  for (int64_t i = 0; i < list->numel(); ++i) inside &= p[i] >= 0 && p[i] < below;
  TORCH_CHECK(inside, name, " has an entry outside 0 .. ", below - 1);
  return p;
}

// Position in the list of computed channels -> channel. Without a list, all channels.
struct Channels {
  const int32_t* idx;
  int64_t count;
  Channels(const OptTensor& list, int64_t h)
      : idx(checked_list(list, h, "idx")), count(list.has_value() ? list->numel() : h) {}
  int64_t operator()(int64_t position) const { return idx ? idx[position] : position; }
};

#define SP_DISPATCH(TYPE, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, TYPE, "stageprune", __VA_ARGS__)

at::ScalarType sum_type(at::ScalarType t) { return t == at::kDouble ? at::kDouble : at::kFloat; }

// ---- Operators ---------------------------------------------------------------------------------

void check_up(const Tensor& x, const OptTensor& wg, const Tensor& wu, const OptTensor& bg,
              const OptTensor& bu) {
  TORCH_CHECK(x.dim() == 2 && wu.dim() == 2, "x must be [rows, d] and w_up [h, d]");
  const auto dtype = wu.scalar_type();
  check(x, dtype, {x.size(0), wu.size(1)}, "x");
  check(wu, dtype, wu.sizes(), "w_up");
  check(wg, dtype, wu.sizes(), "w_gate");
  check(bg, dtype, {wu.size(0)}, "b_gate");
  check(bu, dtype, {wu.size(0)}, "b_up");
}

// The first half of the block and its arguments.
template <typename T>
struct Up {
  using A = acc_t<T>;
  const T *wg, *wu, *bg, *bu;
  const Channels& channels;
  Act act;

  A gate_bias(int64_t position) const { return bg ? A(bg[channels(position)]) : A(0); }
  A up_bias(int64_t position) const { return bu ? A(bu[channels(position)]) : A(0); }

  // h[r, p] = act(gate) * up, or act(up) where there is no gate.
  void both(const Input<T>& x, A* h) const {
    const int64_t n = channels.count;
    if (wg)
      project<T, 2>({wg, wu}, n, channels, x, [&](int64_t p, int64_t r, const A* v) {
        h[r * n + p] = activate(act, v[0] + gate_bias(p)) * (v[1] + up_bias(p));
      });
    else
      project<T, 1>({wu}, n, channels, x, [&](int64_t p, int64_t r, const A* v) {
        h[r * n + p] = activate(act, v[0] + up_bias(p));
      });
  }
  // h[r, p] = act(gate).
  void gate(const Input<T>& x, A* h) const {
    const int64_t n = channels.count;
    project<T, 1>({wg}, n, channels, x, [&](int64_t p, int64_t r, const A* v) {
      h[r * n + p] = activate(act, v[0] + gate_bias(p));
    });
  }
  // h[r, p] *= up, for active p. A zero stays zero: it may stand for a dropped channel.
  void times_up(const Input<T>& x, const std::vector<int32_t>& active, A* h) const {
    const auto channel = [&](int64_t a) { return channels(active[a]); };
    project<T, 1>({wu}, active.size(), channel, x, [&](int64_t a, int64_t r, const A* v) {
      A& value = h[r * channels.count + active[a]];
      if (value != A(0)) value *= v[0] + up_bias(active[a]);
    });
  }
};

Tensor gate_up(const Tensor& x, const OptTensor& wg, const Tensor& wu, const OptTensor& bg,
               const OptTensor& bu, const OptTensor& idx, c10::string_view act) {
  check_up(x, wg, wu, bg, bu);
  const Channels channels(idx, wu.size(0));
  const Tensor h = at::empty({x.size(0), channels.count}, sum_type(wu.scalar_type()));
  SP_DISPATCH(wu.scalar_type(), [&] {
    using T = scalar_t;
    const Up<T> up{ptr<T>(wg), ptr<T>(wu), ptr<T>(bg), ptr<T>(bu), channels, parse_act(act)};
    up.both(Input<T>(x), h.mutable_data_ptr<acc_t<T>>());
  });
  return h;
}

Tensor down(const Tensor& h, const Tensor& wd_t, const OptTensor& bd, const OptTensor& idx,
            const OptTensor& mask) {
  TORCH_CHECK(h.dim() == 2 && wd_t.dim() == 2, "h must be [rows, n] and w_down_t [h, d]");
  const auto dtype = wd_t.scalar_type();
  const Channels channels(idx, wd_t.size(0));
  const int64_t rows = h.size(0), n = channels.count, d = wd_t.size(1);
  check(h, sum_type(dtype), {rows, n}, "h");
  check(wd_t, dtype, wd_t.sizes(), "w_down_t");
  check(bd, dtype, {d}, "b_down");
  check(mask, at::kBool, {rows, n}, "mask");
  const Tensor y = at::empty({rows, d}, dtype);
  SP_DISPATCH(dtype, [&] {
    using A = acc_t<scalar_t>;
    const A* given = h.const_data_ptr<A>();
    const bool* kept = ptr<bool>(mask);
    std::vector<A> masked(given, given + rows * n);
    std::vector<int32_t> active;
    for (int64_t p = 0; p < n; ++p) {
      bool any = !kept;
      for (int64_t r = 0; kept && r < rows; ++r) {
        any |= kept[r * n + p];
        if (!kept[r * n + p]) masked[r * n + p] = A(0);
      }
      if (any) active.push_back(p);
    }
    down_project(ptr<scalar_t>(wd_t), ptr<scalar_t>(bd), active, channels, masked.data(), n, rows,
                 d, y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

// Zeroes in h what a row drops, fills `selected`, and returns the positions that some row keeps: the
// k best candidates of each row (of all rows together if shared), and whatever is no candidate, if
// `others` stay.
template <typename A>
std::vector<int32_t> select(std::vector<A>& h, int64_t rows, const Channels& channels,
                            const int32_t* cand, int64_t n_cand, int64_t k, const A* col_norm,
                            const A* up_norm, bool shared, bool others, int32_t* selected) {
  const int64_t n = channels.count;
  std::vector<uint8_t> kept(n, others);
  for (int64_t j = 0; j < n_cand; ++j) kept[cand[j]] = 0;
  std::vector<Ranked<A>> ranked(n_cand);
  for (int64_t r = 0; n_cand && r < (shared ? 1 : rows); ++r) {
    for (int64_t j = 0; j < n_cand; ++j) {
      const int64_t p = cand[j], c = channels(p);
      A size = h[r * n + p];
      if (shared && rows > 1) {
        A squares = 0;
        for (int64_t i = 0; i < rows; ++i) squares += h[i * n + p] * h[i * n + p];
        size = std::sqrt(squares);
      }
      ranked[j] = Ranked<A>(size * (col_norm[c] * (up_norm ? up_norm[c] : A(1))), p);
    }
    if (k < n_cand) std::nth_element(ranked.begin(), ranked.begin() + k, ranked.end());
    for (int64_t j = 0; j < k; ++j) {
      kept[ranked[j].position] = 1;
      selected[r * k + j] = channels(ranked[j].position);
    }
    std::sort(selected + r * k, selected + (r + 1) * k);
    // What this row drops another may keep.
    for (int64_t j = k; j < n_cand && !shared && rows > 1; ++j)
      h[r * n + ranked[j].position] = A(0);
  }
  std::vector<int32_t> active;
  active.reserve(n);
  for (int64_t p = 0; p < n; ++p)
    if (kept[p]) active.push_back(p);
  return active;
}

std::tuple<Tensor, Tensor> ffn_decode(
    const Tensor& x, const OptTensor& wg, const Tensor& wu, const Tensor& wd_t, const OptTensor& bg,
    const OptTensor& bu, const OptTensor& bd, const OptTensor& idx, const OptTensor& cand,
    int64_t k, const OptTensor& col_norm, const OptTensor& up_norm, c10::string_view act,
    bool shared, std::optional<int64_t> k_down) {
  check_up(x, wg, wu, bg, bu);
  const auto dtype = wu.scalar_type();
  const int64_t rows = x.size(0), d = x.size(1), h = wu.size(0);
  check(wd_t, dtype, wu.sizes(), "w_down_t");
  check(bd, dtype, {d}, "b_down");
  check(col_norm, sum_type(dtype), {h}, "col_norm");
  check(up_norm, sum_type(dtype), {h}, "up_norm");
  const Channels channels(idx, h);
  const int64_t n_cand = cand.has_value() ? cand->numel() : 0;
  const int32_t* candidates = checked_list(cand, channels.count, "cand");
  TORCH_CHECK(k >= 0 && k <= n_cand, "k must lie in 0 .. ", n_cand, ", got ", k);
  TORCH_CHECK(!n_cand || col_norm.has_value(), "candidates need col_norm");
  TORCH_CHECK(!up_norm.has_value() || wg.has_value(), "up_norm needs w_gate");
  TORCH_CHECK(!k_down || (up_norm.has_value() && n_cand == channels.count && *k_down <= k),
              "k_down chooses again among the k that were chosen by the gate");
  const Tensor y = at::empty({rows, d}, dtype);
  const Tensor selected = at::empty({shared ? 1 : rows, k_down.value_or(k)}, at::kInt);
  SP_DISPATCH(dtype, [&] {
    using T = scalar_t;
    const Up<T> up{ptr<T>(wg), ptr<T>(wu), ptr<T>(bg), ptr<T>(bu), channels, parse_act(act)};
    const Input<T> input(x);
    std::vector<acc_t<T>> hidden(rows * channels.count);
    up_norm.has_value() ? up.gate(input, hidden.data()) : up.both(input, hidden.data());
    const auto* norms = ptr<acc_t<T>>(col_norm);
    std::vector<int32_t> first(k_down ? (shared ? 1 : rows) * k : 0);
    auto* const chosen = selected.mutable_data_ptr<int32_t>();
    auto active = select(hidden, rows, channels, candidates, n_cand, k, norms,
                         ptr<acc_t<T>>(up_norm), shared, true, k_down ? first.data() : chosen);
    if (up_norm.has_value()) up.times_up(input, active, hidden.data());
    if (k_down) {
      // What one row dropped and another kept is zero in h, and so never before what it kept.
      const auto among = active;
      active = select(hidden, rows, channels, among.data(), among.size(), *k_down, norms,
                      static_cast<const acc_t<T>*>(nullptr), shared, false, chosen);
    }
    down_project(ptr<T>(wd_t), ptr<T>(bd), active, channels, hidden.data(), channels.count, rows, d,
                 y.mutable_data_ptr<T>());
  });
  return {y, selected};
}

}  // namespace

TORCH_LIBRARY(stageprune, m) {
  m.def("gate_up(Tensor x, Tensor? w_gate, Tensor w_up, Tensor? b_gate, Tensor? b_up, Tensor? idx, "
        "str act) -> Tensor");
  m.def("down(Tensor h, Tensor w_down_t, Tensor? b_down, Tensor? idx, Tensor? mask) -> Tensor");
  m.def("ffn_decode(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, Tensor? b_gate, "
        "Tensor? b_up, Tensor? b_down, Tensor? idx, Tensor? cand, int k, Tensor? col_norm, "
        "Tensor? up_norm, str act, bool shared, int? k_down=None) -> (Tensor y, Tensor selected)");
  m.def("_limit_isa(int limit) -> ()", [](int64_t limit) { isa_limit = limit; });
}

TORCH_LIBRARY_IMPL(stageprune, CPU, m) {
  m.impl("gate_up", gate_up);
  m.impl("down", down);
  m.impl("ffn_decode", ffn_decode);
}
