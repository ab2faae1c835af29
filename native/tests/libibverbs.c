/* A stand-in for the system's libibverbs, with its names and versions, for the tests of what opens it: it carries no
 * message. Flags of the compiler make it another library:
 *   -Dibv_reg_mr=other   that lacks a symbol
 *   -DERROR=1            that lists no devices, with 1 in errno
 *   -DEXTENDED=320       whose contexts have that many bytes of struct verbs_context
 *   -DOLD_KERNEL         whose kernel cannot be asked for the type of an address
 *   -DVERSION_1_0        that gives functions of version 1.0 to programs that request no version */
#include "../verbs/verbs_abi.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifndef ERROR
#define ERROR -1
#endif

static struct ibv_device device = {.name = "stand0"};
static struct verbs_context context;

static int extended_query_port(struct ibv_context *of, uint8_t port, struct ibv_port_attr *attr, size_t bytes) {
  (void)of;
  memset(attr, 0, bytes);
  attr->lid = port;
  attr->link_layer = IBV_LINK_LAYER_ETHERNET;
  attr->port_cap_flags2 = 0x7e57;
  return 0;
}

#ifdef VERSION_1_0
struct ibv_device **list_of_old(int *num_devices) {
  *num_devices = 0;
  abort();
}
__asm__(".symver list_of_old, ibv_get_device_list@@IBVERBS_1.0");
__asm__(".symver list_of_today, ibv_get_device_list@IBVERBS_1.1");
#define ibv_get_device_list list_of_today
#endif

struct ibv_device **ibv_get_device_list(int *num_devices) {
  errno = ERROR;
  if (ERROR >= 0) return NULL;
  struct ibv_device **list = calloc(2, sizeof *list);
  const char *path = getenv("STAND_IN_SYSFS");
  if (path) strncpy(device.ibdev_path, path, sizeof device.ibdev_path - 1);
  list[0] = &device;
  *num_devices = 1;
  return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *of) { return of->name; }

struct ibv_context *ibv_open_device(struct ibv_device *of) {
  context.context.device = of;
#ifdef EXTENDED
  context.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  context.query_port = extended_query_port;
  context.sz = EXTENDED;
#else
  (void)extended_query_port;
#endif
  return &context.context;
}

int ibv_close_device(struct ibv_context *of) { return of == &context.context ? 0 : EINVAL; }

int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attr) {
  (void)of;
  memset(attr, 0, sizeof *attr);
  return 0;
}

/* Writes the struct of old, without port_cap_flags2. Port 2 is InfiniBand. */
int ibv_query_port(struct ibv_context *of, uint8_t port, struct ibv_port_attr *attr) {
  (void)of;
  memset(attr, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
  attr->lid = port;
  attr->link_layer = port == 2 ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
  return 0;
}

/* Beyond the end of the table it returns -1, and may not say why. */
int ibv_query_gid(struct ibv_context *of, uint8_t port, int index, union ibv_gid *gid) {
  (void)of, (void)port;
  memset(gid, index, sizeof *gid);
  if (index == 8) errno = EPERM;
  return index < 8 ? 0 : -1;
}

int _ibv_query_gid_ex(struct ibv_context *of, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t entry_size) {
  (void)of, (void)port;
  if (flags || entry_size != sizeof *entry) return EINVAL;
#ifdef OLD_KERNEL
  return EOPNOTSUPP;
#endif
  if (index > 3) return ENODATA;
  entry->gid_type = index;
  return 0;
}

/* These give nothing and do not say why. */
struct ibv_pd *ibv_alloc_pd(struct ibv_context *of) {
  (void)of;
  return NULL;
}
void *ibv_reg_mr(void) { return NULL; }
void *ibv_create_cq(void) { return NULL; }
void *ibv_create_qp(void) { return NULL; }
int ibv_dealloc_pd(struct ibv_pd *pd) { return pd ? 0 : EINVAL; }
int ibv_dereg_mr(struct ibv_mr *mr) { return mr ? 0 : EINVAL; }
int ibv_destroy_cq(struct ibv_cq *cq) { return cq ? 0 : EINVAL; }
int ibv_modify_qp(void) { return EINVAL; }
int ibv_query_qp(void) { return EINVAL; }
int ibv_destroy_qp(struct ibv_qp *qp) { return qp ? 0 : EINVAL; }
