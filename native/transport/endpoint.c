#include "endpoint.h"

#include "acknowledgement.h"
#include "debug.h"
#include "error.h"
#include "explain.h"
#include "failover.h"
#include "keepalive.h"
#include "queue_pair.h"
#include "receive.h"
#include "reconnect.h"
#include "retransmission.h"
#include "transport.h"

#include <stdio.h>

static int create_channels(struct endpoint *endpoint, uint32_t index) {
  const struct transport *transport = endpoint->transport;
  struct link *link = &endpoint->links[index];
  uint64_t eager = channel_memory_bytes(transport->options, WIRE_EAGER);
  link->mtu = link->device->port.active_mtu;
  int status = link_allocate_slab(link, endpoint->rank, eager + channel_memory_bytes(transport->options, WIRE_BULK));
  for (uint32_t i = 2 * index; i < 2 * index + 2 && !status; i++) {
    endpoint->psn[i] = reconnect_random_psn();
    status = channel_create(&endpoint->channels[i], endpoint, i, link->slab.memory + (i % 2 == WIRE_EAGER ? 0 : eager));
  }
  if (!status) status = link_register_slab(link);
  if (status) return status;
  endpoint->channels[2ull * index].lkey = endpoint->channels[2ull * index + 1].lkey = link->slab.mr->lkey;
  return MLXDIST_OK;
}

int endpoint_create(struct endpoint *endpoint) {
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < endpoint->link_count && !status; link++) status = create_channels(endpoint, link);
  if (status) { /* a device has few queue pairs and regions: none stays with what is not used */
    endpoint_destroy_channels(endpoint);
    endpoint_free_memory(endpoint);
    return status;
  }
  endpoint->channel_count = 2 * endpoint->link_count;
  struct transport_counters *counters = endpoint->transport->counters;
  for (uint32_t link = 0; link < endpoint->link_count; link++) {
    count(&counters->memory_registrations, 1);
    count(&counters->slab_bytes, endpoint->links[link].slab.bytes);
  }
  return MLXDIST_OK;
}

void endpoint_destroy_channels(struct endpoint *endpoint) {
  for (uint32_t i = 0; i < WIRE_CHANNELS; i++) channel_destroy(&endpoint->channels[i]);
}

void endpoint_free_memory(struct endpoint *endpoint) {
  for (uint32_t i = 0; i < endpoint->link_count; i++) link_free_slab(&endpoint->links[i]);
}

void endpoint_address(const struct endpoint *endpoint, struct endpoint_address *address) {
  *address = (struct endpoint_address){.links = endpoint->link_count};
  for (uint32_t i = 0; i < endpoint->link_count; i++) {
    address->gids[i] = endpoint->links[i].gid;
    address->lids[i] = endpoint->links[i].device->port.lid;
    address->mtus[i] = (uint8_t)endpoint->links[i].device->port.active_mtu;
  }
  for (uint32_t i = 0; i < endpoint->channel_count; i++) {
    address->qp_num[i] = endpoint->channels[i].qp->qp_num;
    address->psn[i] = endpoint->psn[i];
  }
}

int endpoint_check_address(struct endpoint *endpoint, const struct endpoint_address *address) {
  if (address->links != endpoint->link_count)
    return fail(MLXDIST_MISMATCH,
                "ranks %d and %d do not agree on the cables between them: one has %u, the other %u; "
                "set MLXDIST_LINKS_PER_PEER and MLXDIST_DEVICE_MAP alike on all",
                endpoint->transport->rank, endpoint->rank, endpoint->link_count, address->links);
  for (uint32_t i = 0; i < endpoint->link_count; i++)
    if (address->mtus[i] && address->mtus[i] < endpoint->links[i].mtu) endpoint->links[i].mtu = address->mtus[i];
  return MLXDIST_OK;
}

int endpoint_connect_channel(struct endpoint *endpoint, uint32_t i, const struct endpoint_address *address) {
  return queue_pair_connect(&endpoint->channels[i], &address->gids[i / 2], address->lids[i / 2], address->qp_num[i],
                            address->psn[i], endpoint->psn[i]);
}

int endpoint_connect(struct endpoint *endpoint, const struct endpoint_address *address) {
  int status = endpoint_check_address(endpoint, address);
  if (status) return status;
  for (uint32_t i = 0; i < endpoint->channel_count; i++) {
    struct channel *channel = &endpoint->channels[i];
    status = endpoint_connect_channel(endpoint, i, address);
    if (!status) status = receive_post_all(channel);
    if (status) return status;
    channel_mark_answered(channel);
    (void)channel_try_open(channel); /* nothing is sent before the endpoint is usable */
  }
  debug(DEBUG_INFO, "connection", "connected to rank %d by %u queue pairs", endpoint->rank, endpoint->channel_count);
  endpoint->connected = true;
  return MLXDIST_OK;
}

/* No acknowledgement is confirmed, so nothing but the peer's probes shows that a link loses them. */
static int acknowledge(struct endpoint *endpoint, bool *sent) {
  if (!endpoint->acks_by_all) return acknowledgement_send(endpoint_eager(endpoint), 0, sent);
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < endpoint->channel_count / 2 && !status; link++) {
    bool here;
    if (link_is_dead(endpoint, link)) continue;
    status = acknowledgement_send(&endpoint->channels[2 * link + WIRE_EAGER], 0, &here);
    *sent |= here;
  }
  return status;
}

int endpoint_flush(struct endpoint *endpoint, bool lazily) {
  bool sent = false;
  int status = endpoint->probe_links ? failover_reply(endpoint) : MLXDIST_OK;
  if (!status && acknowledgement_is_due(endpoint, lazily)) status = acknowledge(endpoint, &sent);
  if (sent) endpoint->ack_requested = false;
  endpoint->ack_pending = endpoint->probe_links || acknowledgement_is_due(endpoint, false);
  if (endpoint->ack_pending) endpoint_mark_ack(endpoint);
  return status;
}

static void warn_of_silence(const struct channel *channel) {
  char why[ENDPOINT_SILENCE_BYTES];
  const struct transport *transport = channel->transport;
  endpoint_explain_silence(channel->endpoint, why, sizeof why);
  if (*why) debug(DEBUG_WARN, "connection", "rank %d on %s: %s", transport->rank, transport->host, why);
}

/* Retransmits, then doubts the link, then the queue pair. */
static int retransmit_late(struct channel *channel, uint64_t now) {
  if (!retransmission_is_due(channel, now)) return MLXDIST_OK;
  int status = channel_retransmit(channel);
  if (status || channel->retry_count < FAILOVER_RETRIES) return status;
  if (channel->retry_count == FAILOVER_RETRIES) warn_of_silence(channel);
  status = failover_probe(channel);
  return status || channel->retry_count != RECONNECT_RETRIES ? status : reconnect_silent(channel);
}

int endpoint_tick(struct endpoint *endpoint, uint64_t now) {
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < endpoint->channel_count && !status; i++) {
    acknowledgement_tick(&endpoint->channels[i], now);
    status = retransmit_late(&endpoint->channels[i], now);
    if (!status) status = keepalive_tick(&endpoint->channels[i], now);
  }
  if (!status && endpoint->dead_links) status = failover_tick(endpoint, now);
  return status ? status : endpoint_flush(endpoint, true);
}

void endpoint_explain_silence(const struct endpoint *endpoint, char *text, size_t bytes) {
  *text = '\0';
  for (uint32_t i = 0; i < endpoint->channel_count && !*text; i++) {
    const struct channel *channel = &endpoint->channels[i];
    const struct verbs *verbs = channel->device->verbs;
    int error = channel->qp && verbs->connect_error ? verbs->connect_error(channel->qp) : 0;
    char why[VERBS_EXPLANATION_BYTES];
    if (!error) continue;
    verbs_explain("connect", error, why, sizeof why);
    snprintf(text, bytes, "connecting to rank %d by TCP fails: %s", endpoint->rank, why);
  }
}

bool endpoint_is_settled(const struct endpoint *endpoint) {
  for (uint32_t i = 0; i < endpoint->channel_count; i++) {
    const struct channel *channel = &endpoint->channels[i];
    if (channel->acked != channel->sent || channel->received != endpoint->last_sent[i / 2].ack[i % 2]) return false;
  }
  return true;
}
