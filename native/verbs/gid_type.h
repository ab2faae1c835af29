/* Which protocol an address of a port's table stands for, by libibverbs and by the kernel's files. */
#pragma once

#include "verbs.h"

enum verbs_gid_type gid_type_of_entry(const struct ibv_gid_entry* entry);

/* For libraries and kernels that do not tell: reads the file below `device_path`, /sys/class/infiniband/DEVICE.
 * Returns 0 or the error's number; UNKNOWN where the kernel has no such files. */
int gid_type_of_file(const char* device_path, uint8_t port, int index, uint8_t link_layer, enum verbs_gid_type* type);
