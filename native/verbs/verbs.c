/* Which provider a group uses, and why. */
#include "verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#ifdef __APPLE__
/* Lives only in the dyld shared cache of macOS 26.2 and later. With RTLD_LAZY or RTLD_LOCAL
 * ibv_get_device_name hangs on every device but the first. */
#define LIBRARY "librdma.dylib"
#define FLAGS (RTLD_NOW | RTLD_GLOBAL)
#else
#define LIBRARY "libibverbs.so.1"
#define FLAGS (RTLD_NOW | RTLD_LOCAL)
#endif

static char reason[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* How many RDMA devices the system's library lists; -1 with errno set if it cannot say. The library stays
 * open: it has loaded its own providers by then, which do not survive being unloaded. */
static int count_devices(void) {
  void *library = dlopen(LIBRARY, FLAGS);
  if (!library) return 0;

  struct ibv_device **(*get_device_list)(int *);
  void (*free_device_list)(struct ibv_device **);
  *(void **)&get_device_list = dlsym(library, "ibv_get_device_list");
  *(void **)&free_device_list = dlsym(library, "ibv_free_device_list");
  if (!get_device_list || !free_device_list) return 0;

  int count = 0;
  errno = 0;
  struct ibv_device **list = get_device_list(&count);
  if (!list) return errno == ENOSYS || errno == 0 ? 0 : -1; /* ENOSYS: the kernel has no RDMA at all */
  free_device_list(list);
  return count;
}

static void find_reason(void) {
  int count = count_devices();
  if (count < 0)
    snprintf(reason, sizeof reason, "RDMA devices could not be listed: %s", strerror(errno));
  else if (count == 0)
    snprintf(reason, sizeof reason, "no RDMA device found");
  else
    snprintf(reason, sizeof reason, "all ranks are on one host; %d RDMA device%s left unused", count,
             count == 1 ? "" : "s");
}

const struct verbs *verbs_choose(const char *soft_profile) {
  return verbs_soft_profile(soft_profile);
}

const char *verbs_reason(void) {
  pthread_once(&once, find_reason);
  return reason;
}
