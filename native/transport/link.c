#include "link.h"

#include "debug.h"
#include "endpoint.h"
#include "error.h"
#include "mlxdist.h"
#include "transport.h"

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
    if (other != link && !(endpoint->dead_links >> other & 1)) return (int32_t)other;
  return -1;
}

bool link_give_up(struct channel *channel, const char *why) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  if (!channel->connected && endpoint->dead_links >> link & 1) return true; /* what was posted before completes, too */
  if (link_other(endpoint, link) < 0) return false;
  debug(DEBUG_WARN, "link", "link %u to rank %d is dead: %s; what it carried goes by another one", link, endpoint->rank,
        why);
  channel_disconnect(&endpoint->channels[2 * link + WIRE_EAGER]);
  channel_disconnect(&endpoint->channels[2 * link + WIRE_BULK]);
  endpoint_mark_dead(endpoint, link);
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
  debug(DEBUG_WARN, "link",
        "link %u to rank %d is dead: the port of device %s is down; what it carried goes by another one", link,
        endpoint->rank, channel->device->name);
  endpoint_mark_dead(endpoint, link);
  return MLXDIST_OK;
}
