#include "link.h"

#include "debug.h"
#include "endpoint.h"
#include "error.h"
#include "mlxdist.h"
#include "transport.h"

#include <stdio.h>

int link_allocate_slab(struct link *link, int32_t peer, uint64_t bytes) {
  struct device *device = link->device;
  link->slab.bytes = bytes;
  link->slab.memory = device->verbs->alloc_memory(device->context, bytes);
  if (link->slab.memory) return MLXDIST_OK;
  return fail(MLXDIST_RESOURCES, "no memory for the slabs to rank %d: %llu bytes", peer, (unsigned long long)bytes);
}

int link_register_slab(struct link *link) {
  link->slab.mr = device_register(link->device, link->slab.memory, link->slab.bytes);
  return link->slab.mr ? MLXDIST_OK : MLXDIST_RESOURCES;
}

void link_free_slab(struct link *link) {
  if (link->slab.mr) device_deregister(link->device, link->slab.mr);
  if (link->slab.memory) link->device->verbs->free_memory(link->device->context, link->slab.memory, link->slab.bytes);
  link->slab.mr = 0;
  link->slab.memory = 0;
}

int32_t link_other(const struct endpoint *endpoint, uint32_t link) {
  for (uint32_t other = 0; other < endpoint->channel_count / 2; other++)
    if (other != link && !link_is_dead(endpoint, other)) return (int32_t)other;
  return -1;
}

void link_drop(struct endpoint *endpoint, uint32_t link, const char *why) {
  debug(DEBUG_WARN, "link", "link %u to rank %d is dead: %s; what it carried goes by another one", link, endpoint->rank,
        why);
  endpoint_mark_dead(endpoint, link);
}

bool link_give_up(struct channel *channel, const char *why) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  if (!channel->connected && link_is_dead(endpoint, link)) return true; /* what was posted before completes, too */
  if (link_other(endpoint, link) < 0) return false;
  channel_disconnect(&endpoint->channels[2 * link + WIRE_EAGER]);
  channel_disconnect(&endpoint->channels[2 * link + WIRE_BULK]);
  link_drop(endpoint, link, why);
  return true;
}

int link_port_down(struct channel *channel) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  /* No abort may be posted there either. */
  channel_shut(&endpoint->channels[2 * link + WIRE_EAGER]);
  channel_shut(&endpoint->channels[2 * link + WIRE_BULK]);
  if (link_other(endpoint, link) < 0)
    return fail(MLXDIST_TRANSPORT,
                "the port of device %s, by which rank %d reaches rank %d, is down; is the cable "
                "plugged in at both ends? `mlxdist devices` shows the ports",
                channel->device->name, channel->transport->rank, endpoint->rank);
  char why[96];
  snprintf(why, sizeof why, "the port of device %s is down", channel->device->name);
  link_drop(endpoint, link, why);
  return MLXDIST_OK;
}
