// What is asked for or made ready once on each device of the process.
#pragma once

#include <array>
#include <mutex>

#include <tvm/ffi/tvm_ffi.h>

namespace fp4d {

template <class T>
class PerDevice {
 public:
  // `make` for this device, by one thread at a time, until it returns; what throws is done again by the next call.
  template <class Make>
  T const& of(int device, Make&& make) {
    if (device >= kDevices)
      TVM_FFI_THROW(ValueError) << "device " << device << ", needed one below " << kDevices;
    std::call_once(asked_[device], [&] { values_[device] = make(); });
    return values_[device];
  }

 private:
  static constexpr int kDevices = 64;
  std::array<T, kDevices> values_{};
  std::array<std::once_flag, kDevices> asked_{};
};

}  // namespace fp4d
