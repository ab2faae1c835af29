#include "device.h"

#include "error.h"
#include "mlxdist.h"

#include <errno.h>
#include <string.h>

int device_open(struct device *device, const struct verbs *verbs, int index, int32_t rank) {
  device->verbs = verbs;
  int devices = 0;
  struct ibv_device **list = verbs->get_device_list(&devices);
  if (!list || devices <= index) {
    if (list) verbs->free_device_list(list);
    return fail(MLXDIST_RESOURCES, "provider %s lists %d devices, and %d are needed", verbs->name, devices, index + 1);
  }
  device->context = verbs->open_device(list[index]);
  int error = errno;
  verbs->free_device_list(list);
  if (!device->context)
    return fail(MLXDIST_RESOURCES, "provider %s cannot open its device: %s", verbs->name, strerror(error));
  if (verbs->pose_as_host) verbs->pose_as_host(device->context, (uint32_t)rank);
  struct ibv_device_attr attributes;
  error = verbs->query_device(device->context, &attributes);
  if (!error) error = verbs->query_port(device->context, 1, &device->port);
  if (!error && device->port.state != IBV_PORT_ACTIVE) error = ENETDOWN;
  if (!error) error = verbs->query_gid(device->context, 1, 0, &device->gid);
  if (error) return fail(MLXDIST_RESOURCES, "port 1 of provider %s is unusable: %s", verbs->name, strerror(error));
  device->gathers = attributes.max_sge >= 2;
  device->whole_frames = verbs->whole_frames;
  device->max_frames = (uint32_t)attributes.max_qp_wr;
  device->pd = verbs->alloc_pd(device->context);
  return device->pd ? MLXDIST_OK : fail(MLXDIST_RESOURCES, "alloc_pd failed: %s", strerror(errno));
}

int device_create_cq(struct device *device, int entries) {
  device->cq = device->verbs->create_cq(device->context, entries, 0, 0, 0);
  if (device->cq) return MLXDIST_OK;
  return fail(MLXDIST_RESOURCES, "create_cq of %d entries failed: %s", entries, strerror(errno));
}

void device_close(struct device *device) {
  if (device->cq) device->verbs->destroy_cq(device->cq);
  if (device->pd) device->verbs->dealloc_pd(device->pd);
  if (device->context) device->verbs->close_device(device->context);
  *device = (struct device){0};
}
