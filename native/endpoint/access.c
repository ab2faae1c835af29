#include "access.h"

#include "debug.h"
#include "error.h"
#include "explain.h"
#include "mlxdist.h"

#include <errno.h>

enum { NARROW = IBV_ACCESS_LOCAL_WRITE, WIDE = NARROW | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

/* What the first flags failed with matters most: they are those that the device is expected to take. */
static int fail_both(const struct device *device, const char *verb, const int *flags, const int *errors) {
  char first[VERBS_EXPLANATION_BYTES], second[VERBS_EXPLANATION_BYTES];
  verbs_explain(verb, errors[0], first, sizeof first);
  verbs_explain("", errors[1], second, sizeof second);
  return fail(MLXDIST_RESOURCES,
              "device %s of provider %s: %s failed with access flags 0x%x and 0x%x; with 0x%x: %s; "
              "with 0x%x: %s",
              device->name, device->verbs->name, verb, flags[0], flags[1], flags[1], second, flags[0], first);
}

int access_find(const struct device *device, const char *verb, access_attempt *attempt, void *context, int *found) {
  const int flags[] = {device->whole_frames ? WIDE : NARROW, device->whole_frames ? NARROW : WIDE};
  int errors[2];
  if (*found) {
    errno = 0;
    return attempt(context, *found) ? MLXDIST_OK : device_fail_verb(device, verb, errno);
  }
  for (int i = 0; i < 2; i++) {
    errno = 0; /* what an earlier call left there is no reason for this one */
    if (attempt(context, flags[i])) {
      *found = flags[i];
      debug(DEBUG_INFO, "connection", "device %s: %s with access flags 0x%x", device->name, verb, flags[i]);
      return MLXDIST_OK;
    }
    errors[i] = errno;
  }
  return fail_both(device, verb, flags, errors);
}
