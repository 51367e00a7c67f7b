/* The CUDA runtime, as far as our kernel libraries call it, without a GPU: it does nothing, succeeds and counts. One
 * call can be told to fail. For tests/compile/test_host_calls.py. */
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

static int encode_tiled(void* map) {
  memset(map, 0, 128);
  return count("cuTensorMapEncodeTiled");
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
  (void)attribute, (void)of;
  *value = 132;
  return count(__func__);
}

int cudaDriverGetVersion(int* version) {
  *version = 13000;
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
COUNTS(cudaFuncGetAttributes)
COUNTS(cudaGetLastError)
COUNTS(cudaPeekAtLastError)
COUNTS(cudaLaunchKernelExC)
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
