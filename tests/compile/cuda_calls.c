/* The CUDA runtime, as far as our kernel libraries call it, without a GPU: it does nothing, succeeds and counts; devices
 * are an H200 each. One call can be told to fail. For tests/compile/test_host_calls.py. */
#include <stdint.h>
#include <string.h>

enum { kMost = 64 };
static struct {
  const char* name;
  long calls;
} table[kMost];
static char failing[64];
static int error_code, device;

static int count(const char* name) {
  int i = 0;
  while (i < kMost - 1 && table[i].name && strcmp(table[i].name, name) != 0) ++i;
  table[i].name = name;
  ++table[i].calls;
  return strcmp(failing, name) == 0 ? error_code : 0;
}

void counts_reset(void) { memset(table, 0, sizeof table); }
const char* counted_name(int i) { return i < kMost ? table[i].name : 0; }
long counted_calls(int i) { return table[i].calls; }
void fail_with(const char* name, int error) {
  strncpy(failing, name, sizeof failing - 1);
  error_code = error;
}
int current_device(void) { return device; }

/* A descriptor here: the mark, bits that CUTLASS clears one of (bit 21, for small tensors and old drivers), address, sizes. */
static const uint64_t kMark = 0x7e57ab1e5eedc0de;
enum { kWords = 16, kMaps = 4, kMostParameters = 2048 };
static uint64_t launched[kMaps][kWords];
uint64_t launched_map(int i, int word) { return launched[i][word]; }

static int encode_tiled(uint64_t* map, int type, unsigned rank, void* address, const uint64_t* sizes) {
  (void)type, (void)rank;
  memset(map, 0, kWords * sizeof *map);
  map[0] = kMark, map[1] = ~UINT64_C(0), map[2] = (uintptr_t)address, map[3] = sizes[0], map[4] = sizes[1];
  return count("cuTensorMapEncodeTiled");
}

/* cudaLaunchConfig_t and cudaLaunchAttribute, as far as they are read. */
struct attribute {
  int id, padding;
  unsigned value, more[15];
};
struct config {
  unsigned grid[3], block[3];
  uint64_t shared;
  void* stream;
  const struct attribute* attributes;
  unsigned count;
};
static struct config last;
static struct attribute attributes[kMost];

/* The first number of a launch attribute of the last launch; -1 where it has none. */
long launched_attribute(int id) {
  for (unsigned i = 0; i < last.count; ++i)
    if (attributes[i].id == id) return attributes[i].value;
  return -1;
}

/* Takes the descriptors out of the kernel's only parameter, where they are on 64 bytes. It ends somewhere below
 * kMostParameters, still on the stack: what is found after its own is to be left alone. */
int cudaLaunchKernelExC(const void* config, const void* kernel, void** parameters) {
  (void)kernel;
  last = *(const struct config*)config;
  memcpy(attributes, last.attributes, last.count * sizeof *attributes);
  memset(launched, 0, sizeof launched);
  uintptr_t const start = (uintptr_t)parameters[0];
  int found = 0;
  for (uintptr_t at = (start + 63) / 64 * 64; at < start + kMostParameters && found < kMaps; at += 64)
    if (*(const uint64_t*)at == kMark) memcpy(launched[found++], (const void*)at, sizeof launched[0]);
  return count(__func__);
}

int cudaGetDevice(int* found) {
  *found = device;
  return count(__func__);
}

int cudaSetDevice(int wanted) {
  device = wanted;
  return count(__func__);
}

int cudaDeviceGetAttribute(int* value, int attribute, int of) {
  enum { kSharedOfMultiprocessor = 81, kSharedOfBlock = 97 };
  (void)of;
  *value = attribute == kSharedOfMultiprocessor ? 233472 : attribute == kSharedOfBlock ? 232448 : 132;
  return count(__func__);
}

int cudaFuncGetAttributes(int* attributes, const void* kernel) {
  enum { kPtxVersion = 8 }; /* after three sizes of 8 bytes, threads and registers */
  (void)kernel;
  attributes[kPtxVersion] = 90;
  return count(__func__);
}

static int driver = 13000;
void driver_is(int version) { driver = version; }

int cudaDriverGetVersion(int* version) {
  *version = driver;
  return count(__func__);
}

static int entry_point(void** found, int* status, const char* name) {
  *found = (void*)(uintptr_t)encode_tiled;
  *status = 0;
  return count(name);
}

int cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version,
                                     unsigned long long flags, int* status) {
  (void)name, (void)version, (void)flags;
  return entry_point(found, status, "cudaGetDriverEntryPoint");
}

int cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long flags, int* status) {
  (void)name, (void)flags;
  return entry_point(found, status, "cudaGetDriverEntryPoint");
}

int cudaGetDriverEntryPoint_ptsz(const char* name, void** found, unsigned long long flags, int* status) {
  return cudaGetDriverEntryPoint(name, found, flags, status);
}

const char* cudaGetErrorName(int error) { return error ? "cudaErrorPlanted" : "cudaSuccess"; }
const char* cudaGetErrorString(int error) { return error ? "planted" : "no error"; }

#define COUNTS(name) \
  int name() { return count(#name); }
COUNTS(cudaFuncSetAttribute)
COUNTS(cudaGetLastError)
COUNTS(cudaPeekAtLastError)
COUNTS(cudaLaunchKernel)
COUNTS(cudaMemsetAsync)
COUNTS(cudaMemcpyAsync)
COUNTS(cudaStreamSynchronize)
COUNTS(cudaDeviceSynchronize)
COUNTS(cudaMalloc)
COUNTS(cudaMallocAsync)
COUNTS(cudaFree)
COUNTS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
COUNTS(cudaOccupancyMaxActiveClusters)

/* What nvcc's own code calls to register kernels and to launch them with <<<>>>. */
int __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return count("__cudaGetKernel");
}
int __cudaLaunchKernel() { return count("<<<>>>"); }
int __cudaPushCallConfiguration() { return 0; }
int __cudaPopCallConfiguration() { return 0; }
void** __cudaRegisterFatBinary() {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd() {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
void __cudaUnregisterFatBinary() {}
