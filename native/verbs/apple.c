#include "apple.h"

#include <stdio.h>

#ifdef __APPLE__
#include <pthread.h>
#include <sys/sysctl.h>
#endif

#define FRAME 4096u

uint32_t apple_max_message(const char *macos_version) {
  unsigned major = 0, minor = 0;
  int numbers = sscanf(macos_version, "%u.%u", &major, &minor);
  if (numbers < 1) return FRAME;
  return major > 26 || (major == 26 && minor >= 3) ? 4095 * FRAME : FRAME;
}

#ifdef __APPLE__
static char version[32];

static void read_version(void) {
  size_t bytes = sizeof version - 1;
  if (sysctlbyname("kern.osproductversion", version, &bytes, NULL, 0) != 0) *version = 0;
}

const char *apple_macos_version(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_version);
  return version;
}
#endif
