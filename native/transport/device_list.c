/*
 * What devices a provider has, and by which addresses they are reached: for choosing links, and for people.
 *
 * Each is opened, asked and closed before the next one: Apple's library hangs when one is opened twice in a process,
 * and in some calls for a port that is down. So the call that is in progress can be asked for from another thread.
 */
#include "error.h"
#include "explain.h"
#include "mlxdist.h"
#include "probe.h"
#include "providers.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

_Static_assert((int)MLXDIST_GID_IB == VERBS_GID_IB && (int)MLXDIST_GID_ROCE_V1 == VERBS_GID_ROCE_V1 &&
                   (int)MLXDIST_GID_ROCE_V2 == VERBS_GID_ROCE_V2 && (int)MLXDIST_GID_UNKNOWN == VERBS_GID_UNKNOWN &&
                   (int)MLXDIST_GID_MEMORY == VERBS_GID_MEMORY && (int)MLXDIST_GID_TCP == VERBS_GID_TCP,
               "mlxdist_gid_type has the values of verbs_gid_type");
_Static_assert(IF_NAMESIZE <= sizeof((mlxdist_gid){0}.interface), "the name of an interface fits");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char call_in_progress[128];

static void enter(const char *call, const char *device) {
  pthread_mutex_lock(&lock);
  snprintf(call_in_progress, sizeof call_in_progress, "%s(%s)", call, device);
  pthread_mutex_unlock(&lock);
}

static void leave(void) {
  pthread_mutex_lock(&lock);
  call_in_progress[0] = '\0';
  pthread_mutex_unlock(&lock);
}

void mlxdist_devices_call(char *text, uint64_t room) {
  pthread_mutex_lock(&lock);
  snprintf(text, room, "%s", call_in_progress);
  pthread_mutex_unlock(&lock);
}

static int32_t mtu_bytes(enum ibv_mtu mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0; }

/* ::ffff:a.b.c.d: the port of an interface that has the IPv4 address. */
static bool is_ipv4(const uint8_t gid[16]) {
  static const uint8_t prefix[12] = {[10] = 0xff, [11] = 0xff};
  return memcmp(gid, prefix, sizeof prefix) == 0;
}

static void find_interface_of_ipv4(mlxdist_gid *gid, const struct ifaddrs *interfaces) {
  for (const struct ifaddrs *at = interfaces; at; at = at->ifa_next) {
    if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET) continue;
    const struct sockaddr_in *address = (const struct sockaddr_in *)at->ifa_addr;
    if (memcmp(&address->sin_addr, gid->bytes + 12, 4) != 0) continue;
    snprintf(gid->interface, sizeof gid->interface, "%s", at->ifa_name);
    if (at->ifa_netmask)
      gid->prefix = __builtin_popcount(((const struct sockaddr_in *)at->ifa_netmask)->sin_addr.s_addr);
    return;
  }
}

/* Apple calls the device of the Thunderbolt port en2 rdma_en2; the rest is Linux. */
static void find_interface_of_device(mlxdist_gid *gid, const mlxdist_device *device) {
  if (device->link_layer == IBV_LINK_LAYER_THUNDERBOLT) {
    size_t length = strnlen(device->name, sizeof device->name);
    if (strncmp(device->name, "rdma_", 5) == 0 && length - 5 < sizeof gid->interface)
      memcpy(gid->interface, device->name + 5, length - 5); /* the rest is zero */
    return;
  }
  char path[192];
  snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/gid_attrs/ndevs/%d", device->name, gid->index);
  FILE *file = fopen(path, "re");
  if (!file) return; /* the device has no network interface, as those of InfiniBand and of the soft provider */
  if (fgets(gid->interface, sizeof gid->interface, file)) gid->interface[strcspn(gid->interface, "\n")] = '\0';
  fclose(file);
}

static void read_gids(const struct verbs *verbs, struct ibv_context *context, int entries, mlxdist_device *device,
                      const struct ifaddrs *interfaces) {
  static const union ibv_gid none;
  for (int index = 0; index < entries && device->gid_count < MLXDIST_GIDS; index++) {
    union ibv_gid bytes;
    enum verbs_gid_type type = VERBS_GID_UNKNOWN;
    enter("ibv_query_gid", device->name);
    if (verbs->query_gid(context, 1, index, &bytes) != 0 || memcmp(&bytes, &none, sizeof none) == 0) continue;
    if (verbs->query_gid_type(context, 1, index, &type) != 0) type = VERBS_GID_UNKNOWN;
    mlxdist_gid *gid = &device->gids[device->gid_count++];
    *gid = (mlxdist_gid){.index = index, .type = (int32_t)type, .prefix = -1};
    memcpy(gid->bytes, bytes.raw, sizeof gid->bytes);
    if (is_ipv4(gid->bytes)) find_interface_of_ipv4(gid, interfaces);
    if (!gid->interface[0]) find_interface_of_device(gid, device);
  }
}

static void read_limits(const struct ibv_device_attr *attributes, mlxdist_device *device) {
  memcpy(device->firmware, attributes->fw_ver, sizeof device->firmware);
  device->firmware[sizeof device->firmware - 1] = '\0';
  memcpy(device->guid, &attributes->node_guid, sizeof device->guid);
  device->ports = attributes->phys_port_cnt;
  device->max_mr_size = attributes->max_mr_size;
  device->max_qp = attributes->max_qp;
  device->max_qp_wr = attributes->max_qp_wr;
  device->max_sge = attributes->max_sge;
  device->max_cq = attributes->max_cq;
  device->max_cqe = attributes->max_cqe;
  device->max_mr = attributes->max_mr;
  device->max_pd = attributes->max_pd;
}

static void read_port(const struct ibv_port_attr *port, mlxdist_device *device) {
  device->state = (int32_t)port->state;
  device->link_layer = port->link_layer;
  device->width = port->active_width;
  device->speed = port->active_speed;
  device->active_mtu = mtu_bytes(port->active_mtu);
  device->max_mtu = mtu_bytes(port->max_mtu);
  device->max_message = port->max_msg_sz;
}

static void complain(mlxdist_device *device, const char *call, int error) {
  snprintf(device->error, sizeof device->error, "%s: %s (errno %d)", call, strerror(error), error);
}

/* What the library left in errno where it returned nothing better: it sets one and returns -1, or returns it. */
static int error_of(int result) { return result > 0 ? result : errno ? errno : EIO; }

/* On a port that is down Apple's library refuses a protection domain, or hangs. */
static void probe_port(const struct verbs *verbs, struct ibv_context *context, mlxdist_device *device) {
  if (device->state == IBV_PORT_ACTIVE)
    probe_device(verbs, context, enter, &device->probe);
  else
    snprintf(device->probe.error, sizeof device->probe.error, "the port is not active");
}

static void read_device(const struct verbs *verbs, struct ibv_device *handle, int position, bool probe,
                        mlxdist_device *device, const struct ifaddrs *interfaces) {
  *device = (mlxdist_device){.transport = (int32_t)handle->transport_type};
  char which[32];
  snprintf(which, sizeof which, "device %d of the list", position);
  enter("ibv_get_device_name", which);
  const char *name = verbs->get_device_name(handle);
  snprintf(device->name, sizeof device->name, "%s", name ? name : "");
  errno = 0;
  enter("ibv_open_device", device->name);
  struct ibv_context *context = verbs->open_device(handle);
  if (!context) {
    complain(device, "ibv_open_device", error_of(0));
    return;
  }
  struct ibv_device_attr attributes = {0};
  struct ibv_port_attr port = {0};
  enter("ibv_query_device", device->name);
  int result = verbs->query_device(context, &attributes);
  if (result) {
    complain(device, "ibv_query_device", error_of(result));
  } else {
    read_limits(&attributes, device);
    enter("ibv_query_port", device->name);
    result = verbs->query_port(context, 1, &port);
    if (result) complain(device, "ibv_query_port", error_of(result));
  }
  if (!result) {
    read_port(&port, device);
    read_gids(verbs, context, port.gid_tbl_len, device, interfaces);
    if (probe) probe_port(verbs, context, device);
  }
  enter("ibv_close_device", device->name);
  verbs->close_device(context);
}

const char *mlxdist_port_remedy(void) { return verbs_port_remedy(); }

int64_t mlxdist_devices(const char *provider, const char *soft_profile, int32_t probe, mlxdist_device *devices,
                        uint64_t room) {
  char why[512];
  enter("dlopen", provider);
  const struct verbs *verbs = verbs_provider(provider, soft_profile, why, sizeof why);
  if (!verbs) {
    leave();
    fail(MLXDIST_INVALID_ARGUMENT, "%s", why);
    return -1;
  }
  int count = 0;
  errno = 0;
  enter("ibv_get_device_list", "");
  struct ibv_device **list = verbs->get_device_list(&count);
  if (!list) {
    int error = error_of(0);
    leave();
    fail(MLXDIST_RESOURCES, "ibv_get_device_list of provider %s failed: %s (errno %d)", provider, strerror(error),
         error);
    return -1;
  }
  struct ifaddrs *interfaces = NULL;
  if (getifaddrs(&interfaces) != 0) interfaces = NULL; /* then no address has an interface */
  for (int i = 0; i < count && (uint64_t)i < room; i++) read_device(verbs, list[i], i, probe, &devices[i], interfaces);
  freeifaddrs(interfaces);
  enter("ibv_free_device_list", "");
  verbs->free_device_list(list);
  leave();
  return count;
}
