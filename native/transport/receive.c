#include "receive.h"

#include "credit.h"
#include "debug.h"
#include "error.h"
#include "failover.h"
#include "queue_pair.h"
#include "retransmission.h"
#include "transport.h"

#include <stdlib.h>
#include <string.h>

static int post(struct channel *channel, uint32_t slot) {
  channel->recv_descs[slot].posted = true;
  if (!channel->connected) return MLXDIST_OK; /* receive_post_all will */
  struct ibv_sge sge = {.addr = (uintptr_t)(channel->receive_slots + (uint64_t)slot * channel->slot_bytes),
                        .length = channel->slot_bytes,
                        .lkey = channel->lkey};
  struct ibv_recv_wr request = {.wr_id = channel_wr_id(channel, false, slot), .sg_list = &sge, .num_sge = 1}, *bad;
  int error = ibv_post_recv(channel->qp, &request, &bad);
  if (error) return queue_pair_fail(channel, "post_recv", error);
  credit_add(channel);
  struct transport_counters *counters = channel->transport->counters;
  count(&counters->post_recv_calls, 1);
  count(&counters->receives_posted, 1);
  return MLXDIST_OK;
}

int receive_post_all(struct channel *channel) {
  struct wire_acks *last = &channel->endpoint->last_sent[channel_link(channel)];
  uint32_t i = channel_kind(channel);
  int status = MLXDIST_OK;
  channel_mark_connected(channel);
  for (uint32_t slot = 0; slot < channel->slots && !status; slot++)
    if (channel->recv_descs[slot].posted) status = post(channel, slot);
  last->credits[i] = (uint16_t)(channel->received + channel_recv_credits(channel) - last->ack[i]);
  return status;
}

static inline uint64_t message_bytes(const struct recv_desc *desc) {
  return (uint64_t)(recv_payload(desc) - desc->bytes) + recv_header(desc)->length;
}

int recv_release(struct recv_desc *desc) {
  struct channel *channel = desc->channel;
  if (!desc->on_heap) return post(channel, (uint32_t)(desc - channel->recv_descs));
  channel->spilled_bytes -= message_bytes(desc);
  free(desc);
  return MLXDIST_OK;
}

int recv_spill(struct recv_desc **desc) {
  struct recv_desc *from = *desc;
  uint64_t bytes = message_bytes(from);
  bool allowed = from->channel->spilled_bytes + bytes <= CHANNEL_MAX_SPILLED;
  struct recv_desc *to = allowed ? malloc(sizeof *to + bytes) : 0;
  if (!to) return MLXDIST_OK; /* it keeps its slot, and its sender waits */
  from->channel->spilled_bytes += bytes;
  *to = (struct recv_desc){.channel = from->channel, .bytes = (char *)(to + 1), .on_heap = true};
  memcpy(to->bytes, from->bytes, bytes);
  *desc = to;
  return recv_release(from);
}

/* Truncated, or not as it was sent: as good as lost. */
static bool is_damaged(const struct channel *channel, const struct recv_desc *desc, uint32_t bytes) {
  const struct wire_header *header = recv_header(desc);
  if (bytes < sizeof *header) return true;
  uint64_t length = message_bytes(desc);
  if (channel->transport->options->checksum)
    return length > bytes || header->checksum != wire_checksum(desc->bytes, length);
  return header->magic == WIRE_MAGIC && length > bytes && length <= channel->slot_bytes;
}

static int fail_garbled(const struct channel *channel, const struct wire_header *header, uint32_t bytes) {
  int32_t from = channel->peer, rank = channel->transport->rank;
  if (header->magic != WIRE_MAGIC)
    return fail(MLXDIST_TRANSPORT,
                "rank %d received %u bytes from rank %d that are no message of mlxdist; "
                "do all ranks run the same version?",
                rank, bytes, from);
  return fail(MLXDIST_TRANSPORT,
              "rank %d received message %u from rank %d with a wrong header: %u bytes, "
              "kind %u, length %u",
              rank, header->sequence, from, bytes, header->kind, header->length);
}

/* Rejects what no correct peer sends. The bytes come from another process: nothing in them is used before. */
static bool is_garbled(const struct channel *channel, const struct recv_desc *desc, uint32_t bytes) {
  const struct wire_header *header = recv_header(desc);
  if (header->magic != WIRE_MAGIC) return true;
  uint64_t length = message_bytes(desc);
  bool padded = channel->device->whole_frames && length < bytes;
  return (length != bytes && !padded) || bytes > channel->slot_bytes || header->kind < WIRE_DATA ||
         header->kind > WIRE_SKIP;
}

/* What the peer has received on a channel. False: what was never sent. */
static inline bool process_ack(struct channel *channel, uint32_t ack, uint32_t credits) {
  if (!wire_at_least(channel->sent, ack) || credits > channel->slots) return false;
  channel_on_ack(channel, ack, credits);
  return true;
}

static int process_naks(struct channel *channels, const struct wire_acks *acks, uint32_t naks) {
  int status = MLXDIST_OK;
  for (uint32_t kind = WIRE_EAGER; kind <= WIRE_BULK && !status; kind++)
    if (naks >> kind & 1 && acks->ack[kind] == channels[kind].acked) status = channel_retransmit(&channels[kind]);
  return status;
}

/* What the peer has received, and what it lacks. */
static int process_acks(struct endpoint *endpoint, const struct wire_header *header) {
  uint32_t links = header->flags & WIRE_LINKS ? endpoint->channel_count / 2 : 1;
  int status = MLXDIST_OK;
  if (links > 1) failover_on_dead_links(endpoint, ((const struct wire_links *)(header + 1))->dead_links);
  for (uint32_t link = 0; link < links && !status; link++) {
    const struct wire_acks *acks = wire_acks(header, link);
    struct channel *channels = &endpoint->channels[2 * (size_t)link];
    if (!process_ack(&channels[WIRE_EAGER], acks->ack[WIRE_EAGER], acks->credits[WIRE_EAGER]) ||
        !process_ack(&channels[WIRE_BULK], acks->ack[WIRE_BULK], acks->credits[WIRE_BULK]))
      return fail(MLXDIST_TRANSPORT, "rank %d received message %u from rank %d that acknowledges what was never sent",
                  endpoint->transport->rank, header->sequence, endpoint->rank);
    uint32_t naks = header->naks >> 2 * link & 3u;
    if (naks) status = process_naks(channels, acks, naks);
  }
  return status;
}

/* Once a gap: if that is lost, the sender's timer helps. */
static void request_retransmission(struct channel *channel) {
  if (channel->nak_sent_for == channel->received) return;
  channel->endpoint->nak_pending |= 1u << channel->index;
  endpoint_mark_ack(channel->endpoint);
}

/* Of a message that is discarded: its sender will learn what is missing. */
static void discard(struct channel *channel, uint32_t sequence) {
  if (wire_at_least(channel->received, sequence)) {
    channel->endpoint->ack_now = true;
    endpoint_mark_ack(channel->endpoint);
    count(&channel->transport->counters->duplicates, 1);
  } else {
    request_retransmission(channel);
  }
}

static int on_ack(struct channel *channel, const struct wire_header *header) {
  int status = failover_on_ack(channel, header);
  return status ? status : channel->transport->callbacks->on_ack(channel->endpoint, header);
}

/* In order, from here on the owner's. */
static int accept(struct channel *channel, struct recv_desc *desc) {
  const struct wire_header *header = recv_header(desc);
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel), i = channel_kind(channel);
  endpoint->acks[link].ack[i] = ++channel->received;
  bool asked = header->kind == WIRE_DATA && header->flags & WIRE_ACK_REQ;
  if (asked) endpoint->ack_now = true;
  if (asked || channel->received - endpoint->last_sent[link].ack[i] >= channel->ack_share) endpoint_mark_ack(endpoint);
  if (header->kind == WIRE_SKIP) {
    failover_on_skip(channel);
    return MLXDIST_OK;
  }
  return channel->transport->callbacks->on_message(endpoint, desc);
}

/* Where byte_len does not count, the message fills its slot. If the device has written less, the rest is of an earlier
 * message in this slot, which cannot pass for a new one: an old header has an old sequence, and makes a duplicate; what
 * an old acknowledgement says is behind what is known already; a length that the slot cannot have is an error. An old
 * payload behind a new header is found by the checksum alone. */
int receive_complete(struct channel *channel, uint32_t slot, uint32_t byte_len) {
  uint32_t bytes = channel->device->reports_length ? byte_len : channel->slot_bytes;
  struct transport_counters *counters = channel->transport->counters;
  struct recv_desc *desc = &channel->recv_descs[slot];
  const struct wire_header *header = recv_header(desc);
  count(&counters->messages_received, 1);
  count(&counters->receives_posted, (uint64_t)-1);
  credit_remove(channel);
  desc->posted = false;
  if (is_damaged(channel, desc, bytes)) {
    debug(DEBUG_INFO, "message", "damaged: %u bytes from rank %d", bytes, channel->peer);
    count(&counters->damaged, 1);
    request_retransmission(channel);
    return post(channel, slot);
  }
  if (is_garbled(channel, desc, bytes)) return fail_garbled(channel, header, bytes);
  int status = process_acks(channel->endpoint, header);
  if (status) return status;
  if (header->kind == WIRE_ACK) {
    status = on_ack(channel, header);
    return status ? status : post(channel, slot);
  }
  debug(DEBUG_TRACE, "message",
        "from rank %d: number %u, %u is the next: kind %u, place %u of group %u, byte %llu, %u"
        " bytes",
        channel->peer, header->sequence - WIRE_START, channel->received + 1 - WIRE_START, header->kind,
        header->place - WIRE_START, header->group, (unsigned long long)header->offset, header->length);
  if (header->sequence == channel->received + 1) {
    bool is_data = header->kind == WIRE_DATA;
    status = accept(channel, desc);
    if (status || is_data) return status;
  } else {
    discard(channel, header->sequence);
  }
  return post(channel, slot);
}
