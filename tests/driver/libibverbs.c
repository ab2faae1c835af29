/*
 * A libibverbs.so.1 for tests of reports about devices: it lists those in its settings, and misbehaves as
 * drivers do. No queue pair can be made with it.
 *
 *   DRIVER_DEVICES   name=state,link_layer,GID,... for each, separated by blanks: "rxe0=4,2,::ffff:10.0.0.1"
 *   DRIVER_FAILS     call:device:errno, "hang" or "crash" in place of a number
 */
#include "verbs_abi.h"

#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES 8
#define GIDS 8

struct port {
  struct ibv_device device;
  struct ibv_context context;
  int state, link_layer, gids;
  union ibv_gid table[GIDS];
};

static struct port ports[DEVICES];
static int opened;

/* Nonzero, and errno set, where the call is to fail. */
static int fails(const char *call, const char *device) {
  char key[128];
  int length = snprintf(key, sizeof key, "%s:%s:", call, device);
  const char *what = getenv("DRIVER_FAILS");
  if (!what || strncmp(what, key, (size_t)length) != 0) return 0;
  what += length;
  if (strcmp(what, "hang") == 0)
    for (;;) pause();
  if (strcmp(what, "crash") == 0) raise(SIGSEGV);
  return errno = atoi(what);
}

static void read_device(struct port *port, char *text) {
  char *at, *fields = strchr(text, '=');
  *fields++ = '\0';
  snprintf(port->device.name, sizeof port->device.name, "%s", text);
  snprintf(port->device.dev_name, sizeof port->device.dev_name, "%s", text);
  port->state = atoi(strtok_r(fields, ",", &at));
  port->link_layer = atoi(strtok_r(NULL, ",", &at));
  for (char *gid; (gid = strtok_r(NULL, ",", &at)); port->gids++) {
    if (strcmp(gid, "-") == 0) continue; /* an empty line of the table */
    if (inet_pton(AF_INET6, gid, port->table[port->gids].raw) != 1) abort();
  }
}

struct ibv_device **ibv_get_device_list(int *count) {
  if (fails("ibv_get_device_list", "")) return NULL;
  struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
  char *text = strdup(getenv("DRIVER_DEVICES")), *at;
  *count = 0;
  for (char *word = strtok_r(text, " ", &at); word; word = strtok_r(NULL, " ", &at)) {
    memset(&ports[*count], 0, sizeof *ports);
    read_device(&ports[*count], word);
    list[*count] = &ports[*count].device;
    ++*count;
  }
  free(text);
  return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

const char *ibv_get_device_name(struct ibv_device *device) {
  return fails("ibv_get_device_name", device->name) ? NULL : device->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
  if (fails("ibv_open_device", device->name)) return NULL;
  if (opened++) abort(); /* Apple's hangs */
  struct port *port = (struct port *)device;
  port->context.device = device;
  return &port->context;
}

int ibv_close_device(struct ibv_context *context) {
  (void)context;
  opened--;
  return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  if (fails("ibv_query_device", context->device->name)) return errno;
  *attr = (struct ibv_device_attr){.fw_ver = "1.2.3", .max_qp = 10, .max_qp_wr = 4095, .phys_port_cnt = 1};
  return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *attr) {
  if (number != 1 || fails("ibv_query_port", context->device->name)) return errno;
  const struct port *port = (struct port *)context->device;
  *attr = (struct ibv_port_attr){
      .state = (enum ibv_port_state)port->state,
      .active_mtu = IBV_MTU_1024,
      .max_mtu = IBV_MTU_4096,
      .gid_tbl_len = port->gids,
      .link_layer = (uint8_t)port->link_layer,
      .active_width = 2,
      .active_speed = 32,
  };
  return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t number, int index, union ibv_gid *gid) {
  (void)number;
  if (fails("ibv_query_gid", context->device->name)) return -1;
  *gid = ((struct port *)context->device)->table[index];
  return 0;
}

/* A probe begins with it; this driver has no domain to give. */
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  if (!fails("ibv_alloc_pd", context->device->name)) abort();
  return NULL;
}

/* The rest is only looked for. */
#define UNUSED(name)                                                                                                   \
  void name(void);                                                                                                     \
  void name(void) { abort(); }
UNUSED(ibv_dealloc_pd)
UNUSED(ibv_reg_mr)
UNUSED(ibv_dereg_mr)
UNUSED(ibv_create_cq)
UNUSED(ibv_destroy_cq)
UNUSED(ibv_create_qp)
UNUSED(ibv_modify_qp)
UNUSED(ibv_query_qp)
UNUSED(ibv_destroy_qp)
