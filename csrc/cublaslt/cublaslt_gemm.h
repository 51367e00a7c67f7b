// cuBLASLt's FP8 GEMM without torch's operator around it, which costs the host more than the launch: descriptors and
// the choice of an algorithm are made once for a shape. The library is the one that torch has loaded, found by name;
// its header is in no wheel that compiles kernels, so what is used of its interface is declared here. The numbers are
// those of cublasLt.h of CUDA 12.9 and 13.0, and it is asked for what torch asks (ScaledBlas.cpp and CUDABlas.cpp,
// https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/cuda), so that the same algorithm runs.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include <dlfcn.h>
#include <library_types.h>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "common/divide_up.h"
#include "common/ffi_checks.h"
#include "common/per_device.h"
#include "common/scale_block.h"

namespace fp4d::cublaslt {

// ---- What is used of cublasLt.h ----

using Handle = void*;
using Descriptor = void*;  // of an operation, a matrix layout, or preferences

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

constexpr int kCompute32F = 68;                         // cublasComputeType_t
constexpr int32_t kTransposed = 1, kNotTransposed = 0;  // cublasOperation_t
constexpr int32_t kScalar = 0, kVector32F = 3,          // cublasLtMatmulMatrixScale_t
    kVector128 = 4, kBlock128x128 = 5;
constexpr int32_t kBiasEpilogue = 4;  // cublasLtEpilogue_t
constexpr int kWorkspaceBytes = 1;    // cublasLtMatmulPreferenceAttributes_t
enum Attribute {                      // cublasLtMatmulDescAttributes_t
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kFastAccumulation = 25,
  kBiasType = 26,
  kAScaleMode = 31,
  kBScaleMode = 32,
};

// What torch gives cuBLASLt unless it is told otherwise (CublasHandlePool.cpp): another limit, other algorithms.
constexpr uint64_t kMostWorkspace = 1 << 20;
constexpr int64_t kOldest = 120900;  // scales of rows and of blocks, on SM90

struct Library {
  size_t (*version)();
  int (*create)(Handle*);
  int (*operation_create)(Descriptor*, int compute, int scale);
  int (*operation_set)(Descriptor, int attribute, void const*, size_t);
  int (*operation_destroy)(Descriptor);
  int (*layout_create)(Descriptor*, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*layout_destroy)(Descriptor);
  int (*preference_create)(Descriptor*);
  int (*preference_set)(Descriptor, int attribute, void const*, size_t);
  int (*preference_destroy)(Descriptor);
  int (*heuristic)(Handle, Descriptor operation, Descriptor a, Descriptor b, Descriptor c, Descriptor d,
                   Descriptor preference, int wanted, Heuristic*, int* found);
  int (*matmul)(Handle, Descriptor operation, void const* alpha, void const* a, Descriptor, void const* b,
                Descriptor, void const* beta, void const* c, Descriptor, void* d, Descriptor,
                Algorithm const*, void* workspace, size_t, cudaStream_t);
};

// The library of a CUDA major version if this process has it and it is complete; else null.
inline Library const* loaded(int64_t major) {
  static std::mutex lock;
  static std::array<std::unique_ptr<Library>, 32> known;
  if (major < 0 || major >= int64_t(known.size())) return nullptr;
  std::lock_guard<std::mutex> const held(lock);
  if (known[major]) return known[major].get();
  void* const file = dlopen(("libcublasLt.so." + std::to_string(major)).c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (file == nullptr) return nullptr;
  auto found = std::make_unique<Library>();
  bool complete = true;
  auto const take = [&](auto& function, char const* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(file, name));
    complete = complete && function != nullptr;
  };
  take(found->version, "cublasLtGetVersion");
  take(found->create, "cublasLtCreate");
  take(found->operation_create, "cublasLtMatmulDescCreate");
  take(found->operation_set, "cublasLtMatmulDescSetAttribute");
  take(found->operation_destroy, "cublasLtMatmulDescDestroy");
  take(found->layout_create, "cublasLtMatrixLayoutCreate");
  take(found->layout_destroy, "cublasLtMatrixLayoutDestroy");
  take(found->preference_create, "cublasLtMatmulPreferenceCreate");
  take(found->preference_set, "cublasLtMatmulPreferenceSetAttribute");
  take(found->preference_destroy, "cublasLtMatmulPreferenceDestroy");
  take(found->heuristic, "cublasLtMatmulAlgoGetHeuristic");
  take(found->matmul, "cublasLtMatmul");
  if (!complete) return nullptr;
  known[major] = std::move(found);  // never unloaded: the dlopen above holds it
  return known[major].get();
}

inline void check(int status, char const* what) {
  if (status != 0) TVM_FFI_THROW(RuntimeError) << "cuBLASLt: " << what << " failed with status " << status;
}

// One for each device, made on the current one and kept.
inline Handle handle_of(Library const& lt, int device) {
  static PerDevice<Handle> handles;
  return handles.of(device, [&] {
    Handle made = nullptr;
    check(lt.create(&made), "cublasLtCreate");
    return made;
  });
}

// Destroys a descriptor with its owner.
class Owned {
 public:
  explicit Owned(int (*destroy)(Descriptor)) : destroy_(destroy) {}
  Owned(Owned const&) = delete;
  Owned& operator=(Owned const&) = delete;
  ~Owned() {
    if (made_ != nullptr) destroy_(made_);
  }
  Descriptor* out() { return &made_; }
  operator Descriptor() const { return made_; }

 private:
  int (*destroy_)(Descriptor);
  Descriptor made_ = nullptr;
};

// ---- One shape ----

// What has a scale: a whole operand; a row of A and one of B; 128 k of a row of A and 128x128 of B.
enum class Scales : int64_t { kTensor, kRow, kBlock };

constexpr int64_t kBlockTokens = 4;   // M of kBlock is a multiple of it
constexpr int64_t kBlockColumns = 4;  // as is a row of B's scales

// Operands of one GEMM. `a` is e4m3 [M, K] by the time that it runs.
struct Operands {
  TensorView a, b, a_scale, b_scale;
  Optional<TensorView> bias;
  TensorView d;
  Optional<TensorView> workspace;
};

// An operation's descriptor and the addresses that it holds.
struct Operation {
  Owned descriptor;
  void const *a_scale, *b_scale, *bias;
};

// D[M,N] = A[M,K] @ B[N,K]^T. Columns come first there: D^T = (B^T)^T A^T, so its A is our B.
struct Plan {
  Library const& lt;
  Handle handle;
  int device;
  int64_t m, n, k;
  Scales scales;
  bool fp16, biased;
  Owned weight{lt.layout_destroy}, tokens{lt.layout_destroy}, out{lt.layout_destroy};
  Heuristic chosen{};
  std::mutex lock{};
  std::vector<std::unique_ptr<Operation>> idle{};  // as many as threads have run the plan at once

  int type() const { return fp16 ? CUDA_R_16F : CUDA_R_16BF; }

  template <class T>
  void set(Descriptor operation, Attribute attribute, T const& value) const {
    check(lt.operation_set(operation, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  std::unique_ptr<Operation> describe(void const* a_scale, void const* b_scale, void const* bias) const {
    std::unique_ptr<Operation> made(new Operation{Owned(lt.operation_destroy), a_scale, b_scale, bias});
    Owned& operation = made->descriptor;
    check(lt.operation_create(operation.out(), kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(operation, kTransA, kTransposed);
    set(operation, kTransB, kNotTransposed);
    set(operation, kAScalePointer, b_scale);
    set(operation, kBScalePointer, a_scale);
    set(operation, kFastAccumulation, int8_t(0));
    if (biased) {
      set(operation, kBiasPointer, bias);
      set(operation, kEpilogue, kBiasEpilogue);
      set(operation, kBiasType, int32_t(type()));
    }
    int32_t const of_rows = scales == Scales::kRow ? kVector32F : kScalar;
    set(operation, kAScaleMode, scales == Scales::kBlock ? kBlock128x128 : of_rows);
    set(operation, kBScaleMode, scales == Scales::kBlock ? kVector128 : of_rows);
    return made;
  }

  // One that no other thread has until it is given back, with these addresses. What fails is not given back.
  std::unique_ptr<Operation> take(void const* a_scale, void const* b_scale, void const* bias) {
    std::unique_ptr<Operation> found;
    {
      std::lock_guard<std::mutex> const held(lock);
      if (!idle.empty()) {
        found = std::move(idle.back());
        idle.pop_back();
      }
    }
    if (!found) return describe(a_scale, b_scale, bias);
    if (found->b_scale != b_scale) set(found->descriptor, kAScalePointer, found->b_scale = b_scale);
    if (found->a_scale != a_scale) set(found->descriptor, kBScalePointer, found->a_scale = a_scale);
    if (found->bias != bias) set(found->descriptor, kBiasPointer, found->bias = bias);
    return found;
  }

  void give_back(std::unique_ptr<Operation> operation) {
    std::lock_guard<std::mutex> const held(lock);
    idle.push_back(std::move(operation));
  }

  void choose() {
    check(lt.layout_create(weight.out(), CUDA_R_8F_E4M3, k, n, k), "cublasLtMatrixLayoutCreate");
    check(lt.layout_create(tokens.out(), CUDA_R_8F_E4M3, k, m, k), "cublasLtMatrixLayoutCreate");
    check(lt.layout_create(out.out(), type(), n, m, n), "cublasLtMatrixLayoutCreate");
    Owned preference(lt.preference_destroy);
    // No one reads them here, but without scales of rows none of their algorithms is offered.
    auto const* const somewhere = reinterpret_cast<void const*>(uintptr_t(1) << 32);
    auto operation = describe(somewhere, somewhere, biased ? somewhere : nullptr);
    check(lt.preference_create(preference.out()), "cublasLtMatmulPreferenceCreate");
    check(lt.preference_set(preference, kWorkspaceBytes, &kMostWorkspace, sizeof kMostWorkspace),
          "cublasLtMatmulPreferenceSetAttribute");
    int found = 0;
    check(
        lt.heuristic(handle, operation->descriptor, weight, tokens, out, out, preference, 1, &chosen, &found),
        "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0 || chosen.status != 0 || chosen.workspace > kMostWorkspace)
      TVM_FFI_THROW(RuntimeError) << "cuBLASLt: no algorithm for M=" << m << ", N=" << n << ", K=" << k;
    give_back(std::move(operation));
  }

  void check_operands(Operands const& o) const {
    DLDataType const wanted = fp16 ? kF16 : kBF16;
    check_dtype({"a", o.a}, {kE4M3});
    check_dtype({"b", o.b}, {kE4M3});
    check_dtype({"a_scale", o.a_scale}, {kF32});
    check_dtype({"b_scale", o.b_scale}, {kF32});
    check_dtype({"d", o.d}, {wanted});
    check_ndim({"a", o.a}, 2);
    check_ndim({"b", o.b}, 2);
    check_ndim({"d", o.d}, 2);
    check_size({"a", o.a}, 0, m, "M of the plan");
    check_size({"a", o.a}, 1, k, "K of the plan");
    check_size({"b", o.b}, 0, n, "N of the plan");
    check_size({"b", o.b}, 1, k, "K of the plan");
    check_size({"d", o.d}, 0, m, "M of the plan");
    check_size({"d", o.d}, 1, n, "N of the plan");
    for (Arg const& arg : {Arg{"a", o.a}, Arg{"b", o.b}, Arg{"d", o.d}}) check_aligned(arg, 16);
    for (Arg const& arg : {Arg{"a", o.a}, Arg{"b", o.b}, Arg{"b_scale", o.b_scale}, Arg{"d", o.d}})
      check_contiguous(arg);
    check_scales(o);
    int64_t bytes = 0;
    if (o.workspace.has_value()) {
      check_dtype({"workspace", *o.workspace}, {kU8});
      check_contiguous({"workspace", *o.workspace});
      bytes = (*o.workspace).numel();
    }
    if (bytes < int64_t(chosen.workspace))
      TVM_FFI_THROW(ValueError) << "workspace: has " << bytes << " bytes, needed " << chosen.workspace;
    if (o.bias.has_value() != biased)
      TVM_FFI_THROW(ValueError) << "bias: the plan is for " << (biased ? "one" : "none");
    if (biased) check_bias({"bias", *o.bias}, wanted, n);
    int const found = check_one_cuda_device({{"a", o.a},
                                             {"b", o.b},
                                             {"a_scale", o.a_scale},
                                             {"b_scale", o.b_scale},
                                             {"bias", biased ? *o.bias : o.a},
                                             {"d", o.d},
                                             {"workspace", o.workspace.has_value() ? *o.workspace : o.a}});
    if (found != device)
      TVM_FFI_THROW(ValueError) << "a: is on cuda:" << found << ", the plan is for cuda:" << device;
  }

  void check_scales(Operands const& o) const {
    if (scales != Scales::kBlock) {
      check_numel({"a_scale", o.a_scale}, scales == Scales::kRow ? m : 1, "of the plan");
      check_numel({"b_scale", o.b_scale}, scales == Scales::kRow ? n : 1, "of the plan");
      check_contiguous({"a_scale", o.a_scale});
      return;
    }
    int64_t const blocks = divide_up(k, kScaleBlock);
    check_ndim({"a_scale", o.a_scale}, 2);
    check_size({"a_scale", o.a_scale}, 0, m, "M of the plan");
    check_size({"a_scale", o.a_scale}, 1, blocks, "ceil(K/128)");
    if (o.a_scale.stride(0) != 1 || (blocks > 1 && o.a_scale.stride(1) != m))
      TVM_FFI_THROW(ValueError) << "a_scale: strides are " << o.a_scale.stride(0) << " and "
                                << o.a_scale.stride(1) << ", needed 1 and " << m
                                << ": tokens are the fastest";
    check_ndim({"b_scale", o.b_scale}, 2);
    check_size({"b_scale", o.b_scale}, 0, divide_up(n, kScaleBlock), "ceil(N/128)");
    check_size({"b_scale", o.b_scale}, 1, divide_up(blocks, kBlockColumns) * kBlockColumns,
               "ceil(K/128) up to a multiple of 4");
    check_aligned({"a_scale", o.a_scale}, 16);
    check_aligned({"b_scale", o.b_scale}, 16);
  }

  // On operands that were checked, with their device current.
  void launch(Operands const& o) {
    auto operation =
        take(data_of<void>(o.a_scale), data_of<void>(o.b_scale), biased ? data_of<void>(*o.bias) : nullptr);
    float const one = 1.f, zero = 0.f;
    void* const result = data_of<void>(o.d);
    void* const workspace = o.workspace.has_value() ? data_of<void>(*o.workspace) : nullptr;
    auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    check(
        lt.matmul(handle, operation->descriptor, &one, data_of<void>(o.b), weight, data_of<void>(o.a), tokens,
                  &zero, result, out, result, out, &chosen.algorithm, workspace, chosen.workspace, stream),
        "cublasLtMatmul");
    give_back(std::move(operation));
  }
};

// Version of the cuBLASLt of a CUDA major version, as 10000 * major + 100 * minor + patch; 0 where this process has not
// loaded it.
inline int64_t version(int64_t major) {
  Library const* const lt = loaded(major);
  return lt == nullptr ? 0 : int64_t(lt->version());
}

inline std::shared_ptr<Plan> plan(int64_t major, int64_t device, int64_t m, int64_t n, int64_t k,
                                  Scales scales, bool fp16, bool biased) {
  Library const* const lt = loaded(major);
  if (lt == nullptr || version(major) < kOldest)
    TVM_FFI_THROW(RuntimeError) << "cuBLASLt of CUDA " << major << ": not loaded or too old ("
                                << version(major) << "), needed " << kOldest;
  if (scales == Scales::kBlock) check_multiple("M", m, kBlockTokens, "block scales");
  tvm::ffi::CUDADeviceGuard guard(static_cast<int>(device));
  auto const made = std::shared_ptr<Plan>(
      new Plan{*lt, handle_of(*lt, int(device)), int(device), m, n, k, scales, fp16, biased});
  made->choose();
  return made;
}

}  // namespace fp4d::cublaslt
