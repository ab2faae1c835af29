#include "apple.h"

#include <stdio.h>

#ifdef __APPLE__
#include <pthread.h>
#include <sys/sysctl.h>
#endif

#define FRAME 4096u

static uint32_t max_message(const char *darwin_release) {
  unsigned major = 0, minor = 0;
  /* NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel writes this text */
  int numbers = sscanf(darwin_release, "%u.%u", &major, &minor);
  if (numbers < 1) return FRAME;
  return major == 25 && minor >= 3 ? 4095 * FRAME : FRAME;
}

void apple_correct_port(const struct ibv_device *device, const char *darwin_release, struct ibv_port_attr *attr) {
  if (device->transport_type == IBV_TRANSPORT_THUNDERBOLT) attr->link_layer = IBV_LINK_LAYER_THUNDERBOLT;
  if (attr->link_layer != IBV_LINK_LAYER_THUNDERBOLT) return;
  uint32_t most = max_message(darwin_release);
  if (attr->max_msg_sz > most) attr->max_msg_sz = most;
}

#ifdef __APPLE__
static char release[32];

static void read_release(void) {
  size_t bytes = sizeof release - 1;
  if (sysctlbyname("kern.osrelease", release, &bytes, NULL, 0) != 0) *release = 0;
}

const char *apple_darwin_release(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_release);
  return release;
}
#endif
