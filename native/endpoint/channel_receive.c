/* The receiving half of a channel: what arrives is checked, and its news read, before anybody sees it. */
#include "cable.h"
#include "debug.h"
#include "engine.h"
#include "matching.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int channel_post_receive(struct channel *channel, uint32_t slot) {
  channel->arrivals[slot].posted = true;
  if (!channel->connected) return MLXDIST_OK; /* channel_post_all will */
  struct ibv_sge sge = {.addr = (uintptr_t)(channel->receive_slots + (uint64_t)slot * channel->slot_bytes),
                        .length = channel->slot_bytes,
                        .lkey = channel->lkey};
  struct ibv_recv_wr request = {.wr_id = engine_wr_id(channel, false, slot), .sg_list = &sge, .num_sge = 1}, *bad;
  int error = ibv_post_recv(channel->qp, &request, &bad);
  if (error) return channel_fail_verb(channel, "post_recv", error);
  channel->outstanding++;
  count(&channel->engine->counters.post_recv_calls, 1);
  count(&channel->engine->counters.receives_posted, 1);
  return MLXDIST_OK;
}

static uint64_t message_bytes(const struct arrival *arrival) {
  return (uint64_t)(arrival_payload(arrival) - arrival->bytes) + arrival_header(arrival)->length;
}

int channel_release(struct arrival *arrival) {
  struct channel *channel = arrival->channel;
  if (!arrival->on_heap) return channel_post_receive(channel, (uint32_t)(arrival - channel->arrivals));
  channel->spilled_bytes -= message_bytes(arrival);
  free(arrival);
  return MLXDIST_OK;
}

int channel_spill(struct arrival **arrival) {
  struct arrival *from = *arrival;
  uint64_t bytes = message_bytes(from);
  bool allowed = from->channel->spilled_bytes + bytes <= CHANNEL_MOST_SPILLED;
  struct arrival *to = allowed ? malloc(sizeof *to + bytes) : 0;
  if (!to) return MLXDIST_OK; /* it keeps its slot, and its sender waits */
  from->channel->spilled_bytes += bytes;
  *to = (struct arrival){.channel = from->channel, .bytes = (char *)(to + 1), .on_heap = true};
  memcpy(to->bytes, from->bytes, bytes);
  *arrival = to;
  return channel_release(from);
}

bool channel_is_crowded(const struct channel *channel) { return channel->outstanding < channel->slots / 2; }

/* Not whole, or not as it was sent: as good as lost. */
static bool is_damaged(const struct channel *channel, const struct arrival *arrival, uint32_t bytes) {
  const struct wire_header *header = arrival_header(arrival);
  if (bytes < sizeof *header) return true;
  uint64_t length = message_bytes(arrival);
  if (channel->engine->options.checksum)
    return length > bytes || header->checksum != wire_checksum(arrival->bytes, length);
  return header->magic == WIRE_MAGIC && length > bytes && length <= channel->slot_bytes;
}

static int fail_garbled(const struct channel *channel, const struct arrival *arrival, uint32_t bytes) {
  const struct wire_header *header = arrival_header(arrival);
  int32_t from = channel->peer->rank, rank = channel->engine->rank;
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

/* Refuses what no correct peer sends. The bytes come from another process: nothing in them is used before. */
static int check_message(const struct channel *channel, const struct arrival *arrival, uint32_t bytes) {
  const struct wire_header *header = arrival_header(arrival);
  if (header->magic != WIRE_MAGIC) return fail_garbled(channel, arrival, bytes);
  uint64_t before = (uint64_t)(arrival_payload(arrival) - arrival->bytes);
  bool padded = channel->device->whole_frames && before + header->length < bytes;
  if ((before + header->length != bytes && !padded) || bytes > channel->slot_bytes || header->kind < WIRE_DATA ||
      header->kind > WIRE_ABORT)
    return fail_garbled(channel, arrival, bytes);
  for (uint32_t i = 0; i < channel->peer->channel_count; i++) {
    const struct channel *other = &channel->peer->channels[i];
    if (!wire_at_least(other->sent, header->ack[i]) || header->room[i] > other->slots)
      return fail(MLXDIST_TRANSPORT, "rank %d received message %u from rank %d that acknowledges what was never sent",
                  channel->engine->rank, header->sequence, channel->peer->rank);
  }
  return MLXDIST_OK;
}

void channel_hear(struct channel *channel, uint32_t received, uint32_t receives) {
  uint32_t credit = received + receives;
  if (wire_at_least(received, channel->acked)) channel->acked = received;
  if (wire_at_least(credit, channel->credit)) channel->credit = credit;
}

static int read_news(struct peer *peer, const struct wire_header *header) {
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    struct channel *channel = &peer->channels[i];
    channel_hear(channel, header->ack[i], header->room[i]);
    if (header->flags & (WIRE_RESEND << i) && header->ack[i] == channel->acked) {
      int status = channel_resend(channel);
      if (status) return status;
    }
  }
  return MLXDIST_OK;
}

/* Does not end any operation by itself: the peer may have failed in a later one, and then what it sent before is
 * all that is missing here, and the result is what the others have (exchange.c). */
static void take_abort(struct channel *channel, const struct arrival *arrival) {
  const struct wire_header *header = arrival_header(arrival);
  struct wire_abort abort = {.status = MLXDIST_ABORTED};
  char text[ERROR_TEXT_BYTES] = "";
  int length = (int)header->length - (int)sizeof abort;
  if (length >= 0) memcpy(&abort, arrival_payload(arrival), sizeof abort);
  if (abort.status <= MLXDIST_OK || abort.status > MLXDIST_RESOURCES) abort.status = MLXDIST_ABORTED;
  if (length > 0) snprintf(text, sizeof text, "%.*s", length, arrival_payload(arrival) + sizeof abort);
  if (!text[0]) snprintf(text, sizeof text, "rank %d has failed", channel->peer->rank);
  failure_set(&channel->engine->failure, abort.status, text);
  channel->peer->failed = true;
  channel->peer->failed_group = header->group;
  channel->peer->failed_after = header->stream;
}

/* Once a gap: if that is lost, the sender's timer helps. */
static void ask_again(struct channel *channel) {
  if (channel->asked_after != channel->received) channel->wants_resend = true;
}

/* In order: true. Else the message is dropped, and its sender will learn what is missing. */
static bool in_sequence(struct channel *channel, uint32_t sequence) {
  if (sequence == channel->received + 1) return true;
  if (wire_at_least(channel->received, sequence)) {
    channel->must_tell = true;
    count(&channel->engine->counters.duplicates, 1);
  } else {
    ask_again(channel);
  }
  return false;
}

/* How long a message is that has arrived. Where byte_len does not count, it fills its slot. If the device has written
 * less, the rest is of an earlier message in this slot, which cannot pass for a new one: an old header has an old
 * sequence, and makes a duplicate; the news of an old acknowledgement are behind what is known already; a length that
 * the slot cannot have is an error. An old payload behind a new header is found by the checksum alone. */
static uint32_t bytes_received(const struct channel *channel, uint32_t byte_len) {
  return channel->device->reports_length ? byte_len : channel->slot_bytes;
}

int channel_on_received(struct channel *channel, uint32_t slot, uint32_t byte_len, struct arrival **delivered) {
  uint32_t bytes = bytes_received(channel, byte_len);
  struct engine_counters *counters = &channel->engine->counters;
  count(&counters->messages_received, 1);
  count(&counters->receives_posted, (uint64_t)-1);
  channel->outstanding--;
  struct arrival *arrival = &channel->arrivals[slot];
  arrival->posted = false;
  const struct wire_header *header = arrival_header(arrival);
  if (is_damaged(channel, arrival, bytes)) {
    debug(DEBUG_INFO, "message", "damaged: %u bytes from rank %d", bytes, channel->peer->rank);
    count(&counters->damaged, 1);
    ask_again(channel);
    return channel_post_receive(channel, slot);
  }
  int status = check_message(channel, arrival, bytes);
  if (!status) status = read_news(channel->peer, header);
  if (!status) cable_heard(channel, header);
  if (status) return status;
  if (header->kind == WIRE_ACK) {
    matching_read_ready(channel->peer, header);
    meeting_read(channel->peer, header);
    return channel_post_receive(channel, slot);
  }
  debug(DEBUG_TRACE, "message",
        "from rank %d: number %u, %u is the next: kind %u, stream %u of group %u, byte %llu, %u"
        " bytes",
        channel->peer->rank, header->sequence - WIRE_START, channel->received + 1 - WIRE_START, header->kind,
        header->stream - WIRE_START, header->group, (unsigned long long)header->offset, header->length);
  if (!in_sequence(channel, header->sequence)) return channel_post_receive(channel, slot);
  channel->received++;
  if (header->kind == WIRE_DATA && header->flags & WIRE_CONFIRM) channel->must_tell = true;
  if (header->kind == WIRE_ABORT) {
    take_abort(channel, arrival);
    return channel_post_receive(channel, slot);
  }
  matching_read_ready(channel->peer, header);
  arrival->next = 0;
  *delivered = arrival;
  return MLXDIST_OK;
}
