#define _GNU_SOURCE 1 /* dlvsym */
#include "library.h"

#include "apple.h"
#include "gid_type.h"
#include "pages.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __APPLE__
/* Lives only in the dyld shared cache of macOS. */
#define PROVIDER "librdma"
#define LIBRARY "librdma.dylib"
#define OF_VERSION ""
#define REMEDY "RDMA over Thunderbolt needs macOS 26.2 or later, on Apple silicon"
#define OTHER_PROVIDER "ibverbs"
#define OTHER_SYSTEM "Linux"
#else
#define PROVIDER "ibverbs"
#define LIBRARY "libibverbs.so.1"
#define OF_VERSION " of version IBVERBS_1.1"
#define REMEDY "install rdma-core's (Debian: apt-get install libibverbs1 ibverbs-providers)"
#define OTHER_PROVIDER "librdma"
#define OTHER_SYSTEM "macOS"
#endif

/* What is called: `exported`, with functions of our own in the places where the library's alone will not do. */
static struct verbs exported, table;
static struct {
  int (*query_gid_ex)(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t entry_size);
  int (*fork_init)(void);
} optional;

struct symbol {
  const char *name, *version;
  void *function; /* to be filled in */
};

/* All but query_port and query_gid_ex have exactly the types of <infiniband/verbs.h>; tests/native/test_verbs_abi.py
 * asks the compiler. */
#define SYMBOL(member) {"ibv_" #member, "IBVERBS_1.1", &exported.member}

static const struct symbol symbols[] = {
    SYMBOL(get_device_list), SYMBOL(free_device_list), SYMBOL(get_device_name), SYMBOL(open_device),
    SYMBOL(close_device),    SYMBOL(query_device),     SYMBOL(query_port),      SYMBOL(query_gid),
    SYMBOL(alloc_pd),        SYMBOL(dealloc_pd),       SYMBOL(reg_mr),          SYMBOL(dereg_mr),
    SYMBOL(create_cq),       SYMBOL(destroy_cq),       SYMBOL(create_qp),       SYMBOL(modify_qp),
    SYMBOL(query_qp),        SYMBOL(destroy_qp),
};

static const struct symbol optional_symbols[] = {
    {"_ibv_query_gid_ex", "IBVERBS_1.11", &optional.query_gid_ex}, /* since rdma-core 33 */
    {"ibv_fork_init", "IBVERBS_1.1", &optional.fork_init},
};

/* libibverbs exports most functions twice: those of version 1.0 take structs of 2005. Libraries that others put in its
 * place may have no versions at all. */
static bool find(void *library, const struct symbol *symbol) {
#ifdef __APPLE__
  void *address = dlsym(library, symbol->name);
#else
  void *address = dlvsym(library, symbol->name, symbol->version);
  if (!address && !dlvsym(library, symbol->name, "IBVERBS_1.0")) address = dlsym(library, symbol->name);
#endif
  memcpy(symbol->function, &address, sizeof address);
  return address;
}

/* --- What the library's own function would not do */

static struct ibv_device *no_devices[1];

/* A kernel without RDMA, and a Mac where it is not enabled, have no devices; that is no error. */
static struct ibv_device **get_device_list(int *num_devices) {
  *num_devices = 0;
  errno = 0;
  struct ibv_device **list = exported.get_device_list(num_devices);
  return !list && (errno == ENOSYS || errno == 0) ? no_devices : list;
}

static void free_device_list(struct ibv_device **list) {
  if (list != no_devices) exported.free_device_list(list);
}

/* Not every provider says why it has nothing to give: without these, an older call's errno would pass for it. */

static struct ibv_context *open_device(struct ibv_device *device) {
  errno = 0;
  return exported.open_device(device);
}

static struct ibv_pd *alloc_pd(struct ibv_context *context) {
  errno = 0;
  return exported.alloc_pd(context);
}

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
  errno = 0;
  return exported.reg_mr(pd, addr, length, access);
}

static struct ibv_cq *create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                struct ibv_comp_channel *channel, int comp_vector) {
  errno = 0;
  return exported.create_cq(context, cqe, cq_context, channel, comp_vector);
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  errno = 0;
  return exported.create_qp(pd, attr);
}

/* ibv_query_port is inline in the real header, too: the exported function knows only the struct of old, which ends
 * before port_cap_flags2 and, in libraries of before 2010, before link_layer. Apple's context is not searched for the
 * newer one: that JACCL calls the exported function there is known to work. */
static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
  memset(attr, 0, sizeof *attr);
#ifdef __APPLE__
  int error = exported.query_port(context, port, attr);
  if (!error) apple_correct_port(context->device, apple_darwin_release(), attr);
  return error;
#else
  if (context->abi_compat != __VERBS_ABI_IS_EXTENDED) return exported.query_port(context, port, attr);
  struct verbs_context *extended = (void *)((char *)context - offsetof(struct verbs_context, context));
  if (extended->sz < sizeof *extended || !extended->query_port) return exported.query_port(context, port, attr);
  return extended->query_port(context, port, attr, sizeof *attr);
#endif
}

/* The only one of ours that does not return the error's number. */
static int query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  errno = 0;
  int status = exported.query_gid(context, port, index, gid);
  if (status >= 0) return status;
  return errno ? errno : EINVAL;
}

static int query_gid_type(struct ibv_context *context, uint8_t port, int index, enum verbs_gid_type *type) {
  *type = VERBS_GID_UNKNOWN;
  if (optional.query_gid_ex) {
    struct ibv_gid_entry entry = {0};
    int error = optional.query_gid_ex(context, port, (uint32_t)index, &entry, 0, sizeof entry);
    if (!error) *type = gid_type_of_entry(&entry);
    if (error != EOPNOTSUPP && error != ENOSYS) return error;
  }
  struct ibv_port_attr attr;
  int error = query_port(context, port, &attr);
  if (error || attr.link_layer == IBV_LINK_LAYER_THUNDERBOLT) return error;
  return gid_type_of_file(context->device->ibdev_path, port, index, attr.link_layer, type);
}

static void *alloc_memory(struct ibv_context *context, size_t bytes) {
  (void)context;
  return pages_alloc(bytes);
}

static void free_memory(struct ibv_context *context, void *memory, size_t bytes) {
  (void)context;
  pages_free(memory, bytes);
}

/* --- Opening it */

static char refusal[1024]; /* why it cannot be used; empty if it can */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* dlerror's text without the name before it and without the list of places that macOS appends. */
static void refuse_missing(void) {
  const char *text = dlerror(), *name = LIBRARY ": ";
  if (!text) text = "no reason given";
  if (strncmp(text, name, strlen(name)) == 0) text += strlen(name);
  const char *end = strstr(text, ", '");
  int length = end ? (int)(end - text) : (int)strcspn(text, "\n");
  snprintf(refusal, sizeof refusal, "provider " PROVIDER ": " LIBRARY " cannot be opened (%.*s); " REMEDY, length,
           text);
}

/* Names every symbol of the table that the library lacks. */
static void find_symbols(void *library) {
  size_t length = 0;
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    if (find(library, &symbols[i]) || length >= sizeof refusal) continue;
    length += (size_t)snprintf(refusal + length, sizeof refusal - length, "%s%s",
                               length ? ", " : "provider " PROVIDER ": " LIBRARY " lacks ", symbols[i].name);
  }
  if (length && length < sizeof refusal) snprintf(refusal + length, sizeof refusal - length, OF_VERSION "; " REMEDY);
  for (size_t i = 0; i < sizeof optional_symbols / sizeof *optional_symbols; i++) find(library, &optional_symbols[i]);
}

/* With RTLD_LAZY or RTLD_LOCAL, ibv_get_device_name of librdma hangs on every device but the first. */
static void open_library(void) {
  void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    refuse_missing();
    return;
  }
  find_symbols(library);
  if (*refusal) return;

  table = exported;
  table.name = PROVIDER;
  table.get_device_list = get_device_list;
  table.free_device_list = free_device_list;
  table.open_device = open_device;
  table.query_port = query_port;
  table.query_gid = query_gid;
  table.query_gid_type = query_gid_type;
  table.alloc_pd = alloc_pd;
  table.reg_mr = reg_mr;
  table.create_cq = create_cq;
  table.create_qp = create_qp;
  table.alloc_memory = alloc_memory;
  table.free_memory = free_memory;
  table.reliable = true;
  /* Kernels of before 5.12 give a page that the device writes to the child of a fork, not to the parent. This keeps
   * the queues of the library's providers out of children; pages.c does it for our memory. It refuses when another
   * user of the library in this process has made something before us: then that one has decided. */
  if (optional.fork_init) optional.fork_init();
}

const struct verbs *verbs_library(const char *name, char *why, size_t bytes) {
  if (strcmp(name, PROVIDER) != 0) {
    bool other = strcmp(name, OTHER_PROVIDER) == 0;
    if (other)
      snprintf(why, bytes, "provider " OTHER_PROVIDER " is " OTHER_SYSTEM "'s; here it is " PROVIDER);
    else
      snprintf(why, bytes, "there is no provider %s; there are soft, ibverbs and librdma (MLXDIST_PROVIDER)", name);
    return NULL;
  }
  pthread_once(&once, open_library);
  if (!*refusal) return &table;
  snprintf(why, bytes, "%s", refusal);
  return NULL;
}
