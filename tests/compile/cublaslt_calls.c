/* cuBLASLt, as far as csrc/cublaslt/cublaslt_gemm.h calls it, without a GPU: it writes down what it is asked. One call can be told
 * to fail. For tests/compile/test_cublaslt_host.py. The true header (cublasLt.h of CUDA 13) says what the numbers mean. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kAttributes = 40 };
static char text[1 << 16];
static size_t length;
static char failing[64];
static int alive, algorithms = 1;
static uint64_t workspace;
static size_t release = 130000;
static void (*during)(void);

static int say(const char* name, const char* what) {
  length += (size_t)snprintf(text + length, sizeof text - length, "%s %s\n", name, what);
  return strcmp(failing, name) == 0 ? 7 : 0;
}

const char* lt_log(void) { return text; }
void lt_reset(void) { length = 0, text[0] = 0; }
void lt_fail(const char* name) { strncpy(failing, name, sizeof failing - 1); }
void lt_answer(int found, uint64_t bytes, size_t version) {
  algorithms = found, workspace = bytes, release = version;
}
int lt_alive(void) { return alive; }
/* Called once, by the next multiplication. */
void lt_during(void (*callback)(void)) { during = callback; }

static int make(void** made, const char* name, const char* what) {
  int const status = say(name, what);
  if (status == 0) *made = calloc(kAttributes, 8), ++alive;
  return status;
}

static int drop(void* made) {
  free(made), --alive;
  return 0;
}

static int set(const char* name, void* of, int attribute, const void* value, size_t size) {
  char line[96];
  int64_t number = 0;
  if (size == 1) number = *(const int8_t*)value;
  if (size == 4) number = *(const int32_t*)value;
  if (size == 8) number = *(const int64_t*)value;
  if (attribute < kAttributes) ((int64_t*)of)[attribute] = number;
  snprintf(line, sizeof line, "%d %zu %lld", attribute, size, (long long)number);
  return say(name, line);
}

size_t cublasLtGetVersion(void) { return release; }
int cublasLtCreate(void** handle) { return make(handle, "cublasLtCreate", ""); }

int cublasLtMatmulDescCreate(void** made, int compute, int scale) {
  char line[64];
  snprintf(line, sizeof line, "%d %d", compute, scale);
  return make(made, "cublasLtMatmulDescCreate", line);
}
int cublasLtMatmulDescSetAttribute(void* of, int attribute, const void* value, size_t size) {
  return set("cublasLtMatmulDescSetAttribute", of, attribute, value, size);
}
int cublasLtMatmulDescDestroy(void* made) { return drop(made); }

int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  char line[96];
  snprintf(line, sizeof line, "%d %llu %llu %lld", type, (unsigned long long)rows,
           (unsigned long long)columns, (long long)ld);
  int const status = make(made, "cublasLtMatrixLayoutCreate", line);
  if (status == 0) *(uint64_t*)*made = rows * 100000 + columns;
  return status;
}
int cublasLtMatrixLayoutDestroy(void* made) { return drop(made); }

int cublasLtMatmulPreferenceCreate(void** made) { return make(made, "cublasLtMatmulPreferenceCreate", ""); }
int cublasLtMatmulPreferenceSetAttribute(void* of, int attribute, const void* value, size_t size) {
  return set("cublasLtMatmulPreferenceSetAttribute", of, attribute, value, size);
}
int cublasLtMatmulPreferenceDestroy(void* made) { return drop(made); }

static void layouts(char* line, size_t size, void* a, void* b, void* c, void* d) {
  snprintf(line, size, "%llu %llu %llu %llu", *(unsigned long long*)a, *(unsigned long long*)b,
           *(unsigned long long*)c, *(unsigned long long*)d);
}

struct result {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, struct result* results, int* found) {
  (void)handle, (void)operation, (void)preference;
  char line[128];
  layouts(line, sizeof line, a, b, c, d);
  for (int i = 0; i < 8; ++i) results[0].algorithm[i] = 40 + (uint64_t)i;
  results[0].workspace = workspace;
  results[0].status = 0;
  *found = algorithms < wanted ? algorithms : wanted;
  return say("cublasLtMatmulAlgoGetHeuristic", line);
}

int cublasLtMatmul(void* handle, void* operation, const float* alpha, const void* a, void* a_layout,
                   const void* b, void* b_layout, const float* beta, const void* c, void* c_layout, void* d,
                   void* d_layout, const uint64_t* algorithm, void* space, size_t bytes, void* stream) {
  (void)handle, (void)stream;
  char line[512], shapes[128];
  void (*const callback)(void) = during;
  during = 0;
  if (callback) callback();
  const int64_t* const held = operation;
  layouts(shapes, sizeof shapes, a_layout, b_layout, c_layout, d_layout);
  snprintf(line, sizeof line, "%g %g %llu %llu %d %llu %llu %zu %llu %llu | %s | %lld %lld %lld",
           (double)*alpha, (double)*beta, (unsigned long long)(uintptr_t)a, (unsigned long long)(uintptr_t)b,
           c == d, (unsigned long long)(uintptr_t)d, (unsigned long long)(uintptr_t)space, bytes,
           (unsigned long long)algorithm[0], (unsigned long long)algorithm[7], shapes, (long long)held[17],
           (long long)held[18], (long long)held[8]);
  return say("cublasLtMatmul", line);
}
