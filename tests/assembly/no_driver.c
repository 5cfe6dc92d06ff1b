/* Stands for the CUDA driver where kernels are assembled and not run: it says that there is a GPU of
   the compute capability that TWELL_TESTS_CAPABILITY names, such as 90, and loads nothing. */

#include <stdlib.h>

enum { MAJOR = 75, MINOR = 76, NOT_FOUND = 500 };

static int capability(void) {
  const char *named = getenv("TWELL_TESTS_CAPABILITY");
  return named ? atoi(named) : 90;
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuGetErrorName(int error, const char **name) { return *name = "no driver", 0; }
int cuGetErrorString(int error, const char **text) { return *text = "no driver", 0; }
int cuGetProcAddress(const char *name, void **found, int version, unsigned long flags) {
  return *found = 0, NOT_FOUND;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int major = capability() / 10, minor = capability() % 10;
  return *value = attribute == MAJOR ? major : attribute == MINOR ? minor : 232448, 0;
}
