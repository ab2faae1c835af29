#include "gid_type.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum verbs_gid_type gid_type_of_entry(const struct ibv_gid_entry *entry) {
  switch (entry->gid_type) {
    case IBV_GID_TYPE_IB: return VERBS_GID_IB;
    case IBV_GID_TYPE_ROCE_V1: return VERBS_GID_ROCE_V1;
    case IBV_GID_TYPE_ROCE_V2: return VERBS_GID_ROCE_V2;
    default: return VERBS_GID_UNKNOWN;
  }
}

/* The kernel has one word for InfiniBand and for RoCE v1. An entry that is empty cannot be read: EINVAL. */
int gid_type_of_file(const char *device_path, uint8_t port, int index, uint8_t link_layer, enum verbs_gid_type *type) {
  *type = link_layer == IBV_LINK_LAYER_INFINIBAND ? VERBS_GID_IB : VERBS_GID_UNKNOWN;
  char name[sizeof((struct ibv_device *)0)->ibdev_path + 64], line[32];
  snprintf(name, sizeof name, "%s/ports/%d/gid_attrs/types/%d", device_path, port, index);
  FILE *file = fopen(name, "r");
  if (!file) return errno == ENOENT ? 0 : errno;
  errno = 0;
  const char *read = fgets(line, sizeof line, file);
  int error = read ? 0 : errno ? errno : ENODATA;
  fclose(file);
  if (error) return error;
  line[strcspn(line, "\n")] = 0;
  if (strcmp(line, "RoCE v2") == 0)
    *type = VERBS_GID_ROCE_V2;
  else if (strcmp(line, "IB/RoCE v1") == 0 && link_layer == IBV_LINK_LAYER_ETHERNET)
    *type = VERBS_GID_ROCE_V1;
  return 0;
}
