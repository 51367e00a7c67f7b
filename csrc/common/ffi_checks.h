// Argument checks shared by every exported entry. All of them run on the host before the first CUDA call, so
// a wrong argument is refused on any machine, with the value found and the value needed, and nothing is
// launched.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include <tvm/ffi/tvm_ffi.h>

namespace fp4d {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Largest M, N or K: rounding up to a 128-wide tile must not leave 32 bits.
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max() - 127;

// A tensor argument with the name that error messages use.
struct Arg {
  char const* name;
  TensorView tensor;
};

inline std::string describe(DLDataType t) {
  char const* base = "dtype code ";
  switch (t.code) {
    case kDLFloat:
      base = "float";
      break;
    case kDLBfloat:
      base = "bfloat";
      break;
    case kDLInt:
      base = "int";
      break;
    case kDLUInt:
      base = "uint";
      break;
    case kDLFloat8_e4m3fn:
      base = "float8_e4m3fn:";
      break;
    case kDLFloat8_e5m2:
      base = "float8_e5m2:";
      break;
    case kDLFloat4_e2m1fn:
      base = "float4_e2m1fn:";
      break;
    default:
      return base + std::to_string(int(t.code));
  }
  std::string text = base + std::to_string(int(t.bits));
  return t.lanes == 1 ? text : text + "x" + std::to_string(int(t.lanes));
}

inline bool same(DLDataType x, DLDataType y) {
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr DLDataType kF16{kDLFloat, 16, 1};
constexpr DLDataType kBF16{kDLBfloat, 16, 1};
constexpr DLDataType kU8{kDLUInt, 8, 1};
constexpr DLDataType kE4M3{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType kE2M1x2{kDLFloat4_e2m1fn, 4, 2};

inline void check_dtype(Arg arg, std::initializer_list<DLDataType> allowed) {
  std::string needed;
  for (DLDataType const& t : allowed) {
    if (same(arg.tensor.dtype(), t)) return;
    needed += (needed.empty() ? "" : " or ") + describe(t);
  }
  TVM_FFI_THROW(TypeError) << arg.name << ": dtype is " << describe(arg.tensor.dtype()) << ", needed "
                           << needed;
}

inline void check_ndim(Arg arg, int ndim) {
  if (arg.tensor.ndim() != ndim)
    TVM_FFI_THROW(ValueError) << arg.name << ": has " << arg.tensor.ndim() << " dimensions, needed " << ndim;
}

inline void check_size(Arg arg, int dim, int64_t needed, char const* meaning) {
  if (arg.tensor.size(dim) != needed)
    TVM_FFI_THROW(ValueError) << arg.name << ": size of dimension " << dim << " is " << arg.tensor.size(dim)
                              << ", needed " << needed << " (" << meaning << ")";
}

inline void check_numel(Arg arg, int64_t needed, char const* meaning) {
  if (arg.tensor.numel() != needed)
    TVM_FFI_THROW(ValueError) << arg.name << ": has " << arg.tensor.numel() << " elements, needed " << needed
                              << " (" << meaning << ")";
}

// One scale for the whole tensor (1 element) or one per row or column (`length` elements).
inline void check_scalar_or_vector(Arg arg, int64_t length, char const* meaning) {
  int64_t const found = arg.tensor.numel();
  if (found != 1 && found != length)
    TVM_FFI_THROW(ValueError) << arg.name << ": has " << found << " elements, needed 1 or " << length << " ("
                              << meaning << ")";
}

inline void check_contiguous(Arg arg) {
  if (!arg.tensor.IsContiguous())
    TVM_FFI_THROW(ValueError) << arg.name << ": not contiguous; call .contiguous()";
}

template <class T>
inline T* data_of(TensorView const& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

inline void check_aligned(Arg arg, uintptr_t bytes) {
  uintptr_t const address = reinterpret_cast<uintptr_t>(data_of<void>(arg.tensor));
  if (address % bytes != 0)
    TVM_FFI_THROW(ValueError) << arg.name << ": address is " << address % bytes << " past a multiple of "
                              << bytes << " bytes, needed a multiple of " << bytes;
}

inline void check_multiple(char const* name, int64_t value, int64_t of, char const* why) {
  if (value % of != 0)
    TVM_FFI_THROW(ValueError) << name << " is " << value << ", needed a multiple of " << of << " (" << why
                              << ")";
}

inline void check_at_most(char const* name, int64_t value, int64_t limit, char const* why) {
  if (value > limit)
    TVM_FFI_THROW(ValueError) << name << " is " << value << ", needed at most " << limit << " (" << why
                              << ")";
}

inline void check_at_least(char const* name, int64_t value, int64_t limit, char const* why) {
  if (value < limit)
    TVM_FFI_THROW(ValueError) << name << " is " << value << ", needed at least " << limit << " (" << why
                              << ")";
}

inline void check_bias(Arg arg, DLDataType out, int64_t n) {
  check_dtype(arg, {out});
  check_ndim(arg, 1);
  check_size(arg, 0, n, "N");
  check_contiguous(arg);
}

// Every tensor on one CUDA device, which is returned.
inline int check_one_cuda_device(std::initializer_list<Arg> args) {
  DLDevice const first = args.begin()->tensor.device();
  for (Arg const& arg : args) {
    DLDevice const found = arg.tensor.device();
    if (found.device_type != kDLCUDA)
      TVM_FFI_THROW(ValueError) << arg.name << ": is not on a CUDA device (DLPack device type "
                                << int(found.device_type) << "), needed a CUDA tensor";
    if (found.device_id != first.device_id)
      TVM_FFI_THROW(ValueError) << arg.name << ": is on cuda:" << found.device_id
                                << ", needed cuda:" << first.device_id << " like " << args.begin()->name;
  }
  return first.device_id;
}

}  // namespace fp4d
