#include "transport.h"

#include "debug.h"
#include "error.h"
#include "failover.h"
#include "frames.h"
#include "providers.h"
#include "receive.h"
#include "reconnect.h"
#include "verbs_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POLL_BATCH 16

_Static_assert(MLXDIST_MAX_LINKS <= WIRE_MAX_LINKS, "the wire has room for all links");

static int open_device(struct transport *transport, const struct verbs *verbs, const char *name, uint32_t index) {
  struct device *device = &transport->devices[transport->device_count++];
  device->link = index;
  return device_open(device, verbs, name, transport->options->has_key ? transport->options->key : 0,
                     (uint32_t)transport->rank);
}

/* The device of a link, opened when it is needed first. */
static int find_device(struct transport *transport, const mlxdist_link *link, uint32_t index, struct device **result) {
  char why[ERROR_TEXT_BYTES];
  const struct verbs *verbs = verbs_provider(link->provider, transport->options->soft_profile, why, sizeof why);
  if (!verbs) return fail(MLXDIST_INVALID_ARGUMENT, "%s", why);
  if (transport->options->reliable && !verbs->reliable)
    return fail(MLXDIST_INVALID_ARGUMENT,
                "provider %s has no reliable connections (MLXDIST_QP_TYPE=rc); RDMA devices have, but for Thunderbolt",
                verbs->name);
  verbs = verbs_trace(verbs);
  for (uint32_t i = 0; i < transport->device_count; i++) {
    *result = &transport->devices[i];
    if ((*result)->verbs == verbs && strcmp((*result)->name, link->device) == 0) return MLXDIST_OK;
  }
  *result = &transport->devices[transport->device_count];
  return open_device(transport, verbs, link->device, index);
}

static int open_link(struct transport *transport, struct endpoint *endpoint, const mlxdist_link *from) {
  struct link *link = &endpoint->links[endpoint->link_count];
  int status = find_device(transport, from, endpoint->link_count, &link->device);
  if (status) return status;
  link->gid_index = from->gid_index < 0 ? device_memory_gid(link->device) : from->gid_index;
  status = device_gid(link->device, link->gid_index, &link->gid);
  if (status) return status;
  endpoint->link_count++;
  return MLXDIST_OK;
}

static int open_links(struct transport *transport, struct endpoint *endpoint, const mlxdist_link *links, uint32_t max) {
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < max && links[i].provider && !status; i++) status = open_link(transport, endpoint, &links[i]);
  if (!status && !endpoint->link_count)
    return fail(MLXDIST_INVALID_ARGUMENT, "no device is named for messages from rank %d to rank %d", transport->rank,
                endpoint->rank);
  return status;
}

/* Each channel has at most its receives, and two windows of sends, outstanding. */
static int create_cq(struct transport *transport, struct device *device) {
  int entries = 0;
  for (int32_t rank = 0; rank < transport->size; rank++)
    for (uint32_t link = 0; link < transport->endpoints[rank]->link_count; link++)
      if (transport->endpoints[rank]->links[link].device == device)
        entries += 3 * (int)(transport->options->eager_slots + transport->options->bulk_slots);
  return device_create_cq(device, entries);
}

/* Devices of the software provider: the same to all, or, where each is the end of one cable, others to each in order of
 * their ranks. mlxdist/runtime/devices/links.py has the same rule. */
static int open_default_links(struct transport *transport, struct endpoint *endpoint) {
  char why[ERROR_TEXT_BYTES], names[MLXDIST_MAX_LINKS][16];
  mlxdist_link links[MLXDIST_MAX_LINKS];
  const struct verbs *verbs = verbs_provider("soft", transport->options->soft_profile, why, sizeof why);
  uint32_t count = transport->options->links_per_peer,
           others = (uint32_t)(endpoint->rank - (endpoint->rank > transport->rank));
  int devices = 0;
  if (verbs) verbs->free_device_list(verbs->get_device_list(&devices));
  uint32_t first = devices > MLXDIST_MAX_LINKS ? count * others : 0;
  for (uint32_t i = 0; i < count; i++) {
    snprintf(names[i], sizeof names[i], "soft%u", first + i);
    links[i] = (mlxdist_link){.provider = "soft", .device = names[i], .gid_index = -1};
  }
  return open_links(transport, endpoint, links, count);
}

/* "soft", or "ibverbs+soft" */
static void name_providers(struct transport *transport) {
  for (uint32_t i = 0; i < transport->device_count; i++) {
    const char *name = transport->devices[i].verbs->name;
    size_t length = strlen(transport->provider);
    if (strstr(transport->provider, name)) continue;
    snprintf(transport->provider + length, sizeof transport->provider - length, "%s%s", length ? "+" : "", name);
  }
}

int transport_open(struct transport *transport, const mlxdist_link *links, const bool *reachable) {
  transport->devices = calloc((size_t)transport->size * MLXDIST_MAX_LINKS, sizeof *transport->devices);
  if (!transport->devices) return fail(MLXDIST_RESOURCES, "out of memory for the devices of %d ranks", transport->size);
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < transport->size && !status; rank++) {
    if (rank == transport->rank || !reachable[rank]) continue;
    struct endpoint *endpoint = transport->endpoints[rank];
    status = links ? open_links(transport, endpoint, &links[(size_t)rank * MLXDIST_MAX_LINKS], MLXDIST_MAX_LINKS)
                   : open_default_links(transport, endpoint);
    for (uint32_t i = 0; i < endpoint->link_count && !status; i++)
      debug(DEBUG_INFO, "connection", "rank %d by device %s of %s, address %d", rank, endpoint->links[i].device->name,
            endpoint->links[i].device->verbs->name, endpoint->links[i].gid_index);
  }
  if (!status) status = frames_fit_slots(transport->options, transport->devices, transport->device_count);
  for (uint32_t i = 0; i < transport->device_count && !status; i++)
    status = create_cq(transport, &transport->devices[i]);
  name_providers(transport);
  return status;
}

void transport_close(struct transport *transport) {
  for (int32_t rank = 0; rank < transport->size; rank++) endpoint_destroy_channels(transport->endpoints[rank]);
  mr_cache_free(transport);
  for (int32_t rank = 0; rank < transport->size; rank++) endpoint_free_memory(transport->endpoints[rank]);
  for (uint32_t i = 0; i < transport->device_count; i++) device_close(&transport->devices[i]);
  free(transport->devices);
}

/* Where the queue pair is given up and not replaced, the device is done with the request all the same. */
static int complete_failed(struct channel *channel, const struct ibv_wc *wc) {
  uint32_t epoch = channel->epoch;
  int status = reconnect_begin(channel, wc->status);
  bool is_send = wc->wr_id >> 63;
  if (!status && is_send && channel->epoch == epoch) channel_complete(channel, (uint32_t)wc->wr_id);
  return status;
}

static int complete(struct transport *transport, const struct ibv_wc *wc) {
  struct endpoint *endpoint = transport->endpoints[wc->wr_id >> 32 & 0xffff];
  struct channel *channel = &endpoint->channels[wc->wr_id >> 48 & (WIRE_CHANNELS - 1)];
  if ((wc->wr_id >> 51 & CHANNEL_EPOCHS) != (channel->epoch & CHANNEL_EPOCHS))
    return MLXDIST_OK; /* of an earlier one */
  if (wc->status != IBV_WC_SUCCESS) return complete_failed(channel, wc);
  if (!(wc->wr_id >> 63)) return receive_complete(channel, (uint32_t)wc->wr_id, wc->byte_len);
  channel_complete(channel, (uint32_t)wc->wr_id);
  return MLXDIST_OK;
}

void transport_poll(struct transport *transport, bool *progressed) {
  struct ibv_wc completions[POLL_BATCH];
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < transport->device_count && !status; i++) {
    int n = ibv_poll_cq(transport->devices[i].cq, POLL_BATCH, completions);
    count(&transport->counters->poll_cq_calls, 1);
    if (n < 0) status = fail(MLXDIST_TRANSPORT, "poll_cq of rank %d failed", transport->rank);
    if (n > 0) *progressed = true;
    for (int k = 0; k < n && !status; k++) status = complete(transport, &completions[k]);
  }
  if (status) transport->callbacks->on_error(transport, status);
}

void transport_flush_pending(struct transport *transport, bool lazily) {
  int status = MLXDIST_OK;
  transport->ack_pending = transport->degraded = false;
  for (int32_t rank = 0; rank < transport->size && !status; rank++) {
    struct endpoint *endpoint = transport->endpoints[rank];
    if (endpoint->dead_links) transport->degraded = true;
    if (endpoint->usable && endpoint->dead_links) status = failover_resend(endpoint);
    if (endpoint->usable && endpoint->ack_pending && !status) status = endpoint_flush(endpoint, lazily);
    if (endpoint->ack_pending) transport->ack_pending = true;
  }
  if (status) transport->callbacks->on_error(transport, status);
}

void transport_tick(struct transport *transport, uint64_t now) {
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < transport->size && !status; rank++)
    if (transport->endpoints[rank]->usable) status = endpoint_tick(transport->endpoints[rank], now);
  if (status) transport->callbacks->on_error(transport, status);
}

bool transport_is_settled(const struct transport *transport) {
  for (int32_t rank = 0; rank < transport->size; rank++)
    if (transport->endpoints[rank]->usable && !endpoint_is_settled(transport->endpoints[rank])) return false;
  return true;
}
