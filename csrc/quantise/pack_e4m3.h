// Tokens quantised to e4m3 and packed as wgmma reads them from shared memory, for w4a8_small.cu, w8a8_small.cu,
// w4_gemm_sm90.cu and w8_gemm_sm90.cu.
//
// 1024 bytes hold 8 tokens of 128 k each as wgmma reads them with 128-byte swizzle: the 16-byte column j of token i is
// stored at j ^ i. Within 64 k = 16 c + r, c = 0..3, the order is that of the weights' registers
// (weights/w4_dequant.h), so that a lane there holds whole scale blocks:
//   column 4 (k / 64 % 2) + 2 s + h, byte 4 c + j:  k = 16 c + 8 s + 4 h + j
//   in their own order: column j, byte i:           k = 16 j + i, of 128
// Lane p of 16 reads 8 elements of the 128 k: p = 8 (k / 64 % 2) + 2 c + r / 8. A column has one word of each of the
// four lanes that differ in c alone, so words change places between these (transpose), and both loads and stores are
// whole lines.
#pragma once

#include "common/async_copy.h"
#include "common/divide_up.h"
#include "common/packed_tokens.h"
#include "common/per_device.h"
#include "quantise/quantize.h"

namespace fp4d {

constexpr int64_t kTokenMultiple = 16;  // K is one: whole 16-byte columns
constexpr int kWarpBlocks = 4;          // of 128 bytes, that a warp writes at once
// At most 16384 registers a block of quantize_tokens, which is what some tiles of many_tokens/kernel.h leave of a
// multiprocessor: it waits there for the GEMM before it to end.
constexpr int kMaxWarps = 8, kMaxThreads = kMaxWarps * 32, kBlocksAtOnce = 4;
constexpr int kMaxPartsLog2 = 3;  // blocks that share a token

// A token's 16-byte column in the first 128 bytes along K.
__device__ inline uint8_t* column_of(uint8_t* packed, int64_t token, int column) {
  return packed + token / kBlockTokens * kBlockBytes + token % kBlockTokens * 128 +
         (column ^ int(token % kBlockTokens)) * 16;
}

__device__ inline void store_vector(uint8_t* to, uint4 value) { *reinterpret_cast<uint4*>(to) = value; }

// Among the four lanes that differ in bits 1 and 2: word i of the one where these bits are j becomes word j of the
// one where they are i.
__device__ inline uint4 transpose(uint4 words) {
  auto const swap = [](uint32_t& low, uint32_t& high, int lanes) {
    bool const upper = threadIdx.x & lanes;
    uint32_t const other = __shfl_xor_sync(~0u, upper ? low : high, lanes);
    (upper ? low : high) = other;
  };
  swap(words.x, words.y, 2);
  swap(words.z, words.w, 2);
  swap(words.x, words.z, 4);
  swap(words.y, words.w, 4);
  return words;
}

// The greatest of all warps that share a token, in one block or a cluster, where each warp sends its own to all.
class TokenAmax {
 public:
  // Before anything else; lets the other blocks know that this one runs.
  __device__ explicit TokenAmax(int parts) : parts_(parts) {
    if (parts == 1) return;
    if (threadIdx.x == 0) {
      uint32_t const barrier = shared_address(shared().barrier);
      barrier_init(barrier, 1);
      barriers_visible();
      barrier_arrive_expect(barrier, parts * (blockDim.x / 32) * 4);
    }
    __syncwarp();
    cluster_arrive();
  }

  __device__ uint32_t operator()(uint32_t bits, int part) const {
    int const lane = threadIdx.x % 32, warps = blockDim.x / 32;
    bits = __reduce_max_sync(~0u, bits);
    uint32_t* const mine = shared().bits + part * warps + threadIdx.x / 32;
    if (parts_ == 1) {
      if (lane == 0) *mine = bits;
      __syncthreads();
    } else {
      uint32_t const barrier = shared_address(shared().barrier);
      cluster_wait();
      if (lane < parts_) {
        send(address_in(shared_address(mine), lane), __uint_as_float(bits), address_in(barrier, lane));
      }
      barrier_wait_cluster(barrier, 0);
      __syncwarp();
    }
    bits = 0;
    for (int i = lane; i < parts_ * warps; i += 32) bits = max(bits, shared().bits[i]);
    return __reduce_max_sync(~0u, bits);
  }

 private:
  struct Shared {
    uint64_t barrier[1];
    uint32_t bits[kMaxWarps << kMaxPartsLog2];
  };
  __device__ static Shared& shared() {
    __shared__ Shared instance;
    return instance;
  }
  int parts_;
};

// 8 elements a vector to two words each.
template <class T>
__device__ inline uint4 quantize(uint4 const (&raw)[2], E4m3Divisor divisor, bool finite) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float q[kVector];
    divisor.divide<T>(raw[i], finite, q);
    words[2 * i] = to_e4m3(q[0], q[1], q[2], q[3]);
    words[2 * i + 1] = to_e4m3(q[4], q[5], q[6], q[7]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// 2^`parts_log2` blocks a token, a cluster where they look for a scale; their warps take turns along K, 512 k at a
// time. `blocks` of 128 k.
template <class Source, class T, bool dynamic, bool transposed, int each, bool once>
__global__ void __launch_bounds__(kMaxThreads, kBlocksAtOnce)
    quantize_tokens(T const* x, int64_t x_stride, uint8_t* packed, float* scale, int64_t token_blocks,
                    int rows, int k, int blocks, int parts_log2) {
  grid_dependency_launch_dependents();
  TokenAmax const greatest(dynamic ? 1 << parts_log2 : 1);
  grid_dependency_wait();
  int64_t const token = blockIdx.x >> parts_log2;
  int const part = blockIdx.x & ((1 << parts_log2) - 1), warps = blockDim.x / 32, lane = threadIdx.x % 32;
  int const step = warps << parts_log2, first = part * warps + threadIdx.x / 32;
  bool const padding = token >= rows;
  T const* const row = padding ? x : x + token * x_stride;
  int const row_k = padding ? 0 : k, tiles = (blocks + kWarpBlocks - 1) / kWarpBlocks;
  auto const load = [&](int tile, int i) {
    return load_padded<Source, once>(row, (tile * 2 + i) * 32 + lane, row_k);
  };

  uint4 cached[2 * each];
#pragma unroll
  for (int i = 0; i < 2 * each; ++i) cached[i] = load(first + i / 2 * step, i % 2);
  Amax amax = amax_of<T>(cached);
  float token_scale;
  if constexpr (dynamic) {
    for (int tile = first + each * step; tile < tiles; tile += step) {
      uint4 const raw[2] = {load(tile, 0), load(tile, 1)};
      Amax const other = amax_of<T>(raw);
      amax = {max(amax.bits, other.bits), amax.finite && other.finite};
    }
    token_scale = scale_of<T>(greatest(amax.bits, part));
    if (part == 0 && threadIdx.x == 0 && !padding) scale[token] = token_scale;
  } else {
    token_scale = *scale >= kMinScale ? *scale : NAN;
    if (padding) token_scale = 1.f;
  }
  // Zeros of the padding stay zero under any scale but NaN.
  E4m3Divisor const divisor(token_scale);

  // After the transposition lanes differ in bit 2 where the warp's 128 k do by 2, in bit 1 where columns are of the
  // first or second four of 8 k.
  int const lane_block = transposed ? lane / 4 % 2 * 2 + lane / 16 : lane / 16;
  int const column = transposed ? lane / 8 % 2 * 4 + lane % 2 * 2 + lane / 2 % 2 : lane % 16 / 2;
  int64_t const block_bytes = token_blocks * kBlockBytes;
  uint8_t* to = column_of(packed, token, column) + (transposed ? 0 : lane % 2 * 8) +
                (first * kWarpBlocks + lane_block) * block_bytes;
  auto const store = [&](int tile, uint4 words) {
    int const block = tile * kWarpBlocks + lane_block;
    if constexpr (transposed) {
      words = transpose(words);
      if (block < blocks) store_vector(to, words);
    } else {
      if (block < blocks) *reinterpret_cast<uint2*>(to) = make_uint2(words.x, words.y);
      if (block + 2 < blocks) *reinterpret_cast<uint2*>(to + 2 * block_bytes) = make_uint2(words.z, words.w);
    }
    to += step * kWarpBlocks * block_bytes;
  };
#pragma unroll
  for (int i = 0; i < each; ++i) {
    uint4 const raw[2] = {cached[2 * i], cached[2 * i + 1]};
    store(first + i * step, quantize<T>(raw, divisor, amax.finite));
  }
  for (int tile = first + each * step; tile < tiles; tile += step) {
    uint4 const raw[2] = {load(tile, 0), load(tile, 1)};
    bool const finite = dynamic ? amax.finite : amax_of<T>(raw).finite;
    store(tile, quantize<T>(raw, divisor, finite));
  }
}

// A warp a token, eight tokens a block. A lane has `vectors` times 8 elements of a step, which has one scale for 16 /
// `vectors` lanes: two vectors share what a scale costs, one lets more warps run. `tiles` blocks along K do `each`
// steps each, of `blocks` of 128 k.
template <class Source, class T, int each, int vectors, bool once>
__global__ void __launch_bounds__(kMaxThreads, kBlocksAtOnce)
    quantize_blocks(T const* x, int64_t x_stride, uint8_t* packed, float* scale, int64_t token_blocks,
                    int rows, int k, int blocks, int tiles) {
  constexpr int kLanes = 16 / vectors;
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const token = int64_t(blockIdx.x / unsigned(tiles)) * kBlockTokens + threadIdx.x / 32;
  int const lane = threadIdx.x % 32, first = blockIdx.x % unsigned(tiles) * each;
  bool const padding = token >= rows;
  T const* const row = padding ? x : x + token * x_stride;
  uint4 raw[each][vectors];
#pragma unroll
  for (int i = 0; i < each; ++i) {
#pragma unroll
    for (int v = 0; v < vectors; ++v)
      raw[i][v] = load_padded<Source, once>(row, ((first + i) * 32 + lane) * vectors + v, padding ? 0 : k);
  }
  uint8_t* const to = column_of(packed, token, lane % kLanes * vectors / 2) + lane * vectors % 2 * 8;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    auto const [block_scale, finite] = scale_among<T, kLanes>(raw[i]);
    E4m3Divisor const divisor(block_scale);
    uint32_t words[2 * vectors];
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      float q[kVector];
      divisor.divide<T>(raw[i][v], finite, q);
      words[2 * v] = to_e4m3(q[0], q[1], q[2], q[3]);
      words[2 * v + 1] = to_e4m3(q[4], q[5], q[6], q[7]);
    }
    int const block = (first + i) * 2 * vectors + lane / kLanes;
    if (block >= blocks) continue;
    uint8_t* const at = to + block * token_blocks * kBlockBytes;
    if constexpr (vectors == 1) {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    } else {
      store_vector(at, make_uint4(words[0], words[1], words[2], words[3]));
    }
    if (lane % kLanes == 0) scale[block * token_blocks * kBlockTokens + token] = block_scale;
  }
}

// Whether x takes so much of L2 that it is read `once`: from 2/5 on what is written gains more than the next reader of x
// would lose (bench/notes/quantisers.md).
inline bool read_once(TensorView x, int device) {
  static PerDevice<int> sizes;
  int const bytes = sizes.of(device, [device] {
    int value = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&value, cudaDevAttrL2CacheSize, device));
    return value;
  });
  return x.size(0) * x.size(1) * 2 > int64_t(bytes) * 2 / 5;
}

template <class Source>
void check_both(TensorView x, TensorView packed) {
  Source::check(x);
  check_packed({"packed", packed}, divide_up(Source::k_of(x), 128), x.size(0));
}

template <class Source, bool dynamic, bool transposed>
void quantize_e4m3(TensorView x, TensorView packed, TensorView scale, bool enable_pdl) {
  check_both<Source>(x, packed);
  check_dtype({"scale", scale}, {kF32});
  check_numel({"scale", scale}, dynamic ? x.size(0) : 1, dynamic ? "M" : "per tensor");
  check_contiguous({"scale", scale});
  int const device = check_one_cuda_device({{"x", x}, {"packed", packed}, {"scale", scale}});
  if (x.size(0) == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const blocks = packed.size(0), tokens = packed.size(1) * kBlockTokens;
  int64_t const tiles = (blocks + kWarpBlocks - 1) / kWarpBlocks;
  // As little a warp as lets all tokens run at once, for latency.
  int64_t const wanted = tokens * tiles / Source::kWarps + 1;
  auto const go = [&](auto const* data, auto each, auto once) {
    using T = std::decay_t<decltype(*data)>;
    int64_t const warps = (tiles + each - 1) / each;
    int64_t parts_log2 = 0;
    while (parts_log2 < kMaxPartsLog2 && kMaxWarps << parts_log2 < warps) ++parts_log2;
    unsigned const parts = 1u << parts_log2;
    int64_t const threads = std::min<int64_t>(kMaxThreads, (warps + parts - 1) / parts * 32);
    Shape const shape{dim3(unsigned(tokens * parts)), dim3(unsigned(threads)), dynamic ? parts : 1u};
    launch(quantize_tokens<Source, T, dynamic, transposed, each, once>, shape, device, enable_pdl, data,
           input_stride(x), data_of<uint8_t>(packed), data_of<float>(scale), packed.size(1), x.size(0),
           Source::k_of(x), blocks, parts_log2);
  };
  with_elements(x, [&](auto const* data) {
    using T = std::decay_t<decltype(*data)>;
    auto const sized = [&](auto each) {
      if (read_once(x, device)) {
        go(data, each, std::true_type{});
      } else {
        go(data, each, std::false_type{});
      }
    };
    if (wanted <= 1) {
      go(data, std::integral_constant<int, 1>{}, std::false_type{});  // too few to take much of L2
    } else if (wanted <= 2) {
      sized(std::integral_constant<int, 2>{});
    } else {
      sized(std::integral_constant<int, Source::template kMostVectors<T> / 2>{});
    }
  });
}

template <class Source>
void quantize_block(TensorView x, TensorView packed, TensorView scale, bool enable_pdl) {
  check_both<Source>(x, packed);
  check_block_scales({"scale", scale}, packed.size(0), packed.size(1));
  check_contiguous({"scale", scale});
  int const device = check_one_cuda_device({{"x", x}, {"packed", packed}, {"scale", scale}});
  if (x.size(0) == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const blocks = packed.size(0), token_blocks = packed.size(1), tokens = token_blocks * kBlockTokens;
  with_elements(x, [&](auto const* data) {
    using T = std::decay_t<decltype(*data)>;
    auto const go = [&](auto each, auto vectors) {
      int64_t const tiles = divide_up(blocks, int64_t(2 * each * vectors));
      Shape const shape{dim3(unsigned(token_blocks * tiles)), dim3(kThreads), 1};
      auto const with = [&](auto once) {
        launch(quantize_blocks<Source, T, each, vectors, once>, shape, device, enable_pdl, data,
               input_stride(x), data_of<uint8_t>(packed), data_of<float>(scale), token_blocks, x.size(0),
               Source::k_of(x), blocks, tiles);
      };
      if constexpr (each > 1) {  // else too few to take much of L2
        if (read_once(x, device)) return with(std::true_type{});
      }
      with(std::false_type{});
    };
    sized_for_a_wave(tokens * divide_up(blocks, int64_t(2)), tokens * divide_up(blocks, int64_t(4)), true,
                     go);
  });
}

}  // namespace fp4d
