/* A stand-in for the system's libibverbs, for the choice of a provider: it lists DEVICES devices, or none at all
 * with ERROR in errno. */
#include <errno.h>
#include <stdlib.h>

#ifndef ERROR
#define ERROR 0
#endif

void **ibv_get_device_list(int *num_devices) {
  static int device;
  if (ERROR) {
    errno = ERROR;
    return NULL;
  }
  void **list = calloc(DEVICES + 1, sizeof *list);
  for (int i = 0; list && i < DEVICES; i++) list[i] = &device;
  *num_devices = DEVICES;
  return list;
}

void ibv_free_device_list(void **list) {
  free(list);
}
