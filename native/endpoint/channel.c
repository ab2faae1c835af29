#include "channel.h"

#include "debug.h"
#include "engine.h"
#include "explain.h"
#include "keepalive.h"
#include "queue_pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static enum wire_channel kind_of(const struct channel *channel) { return channel->index % 2; }

/* Buffers for acknowledgements; on the bulk channel for signs of life (keepalive.h). They stand before the slots: where
 * frames count, what is behind them makes them as long as a slot. */
static uint32_t control_buffers(enum wire_channel kind) { return kind == WIRE_EAGER ? CHANNEL_CONTROL_BUFFERS : 1; }

static uint64_t control_bytes(enum wire_channel kind) { return (uint64_t)control_buffers(kind) * CHANNEL_EAGER_BYTES; }

static uint32_t slots_of(const struct engine *engine, enum wire_channel kind) {
  return kind == WIRE_EAGER ? engine->options.eager_slots : engine->options.bulk_slots;
}

static uint32_t slot_bytes_of(const struct engine *engine, enum wire_channel kind) {
  return kind == WIRE_EAGER ? CHANNEL_EAGER_BYTES : engine->options.bulk_slot_bytes;
}

uint64_t channel_memory_bytes(const struct engine *engine, enum wire_channel kind) {
  return 2ull * slots_of(engine, kind) * slot_bytes_of(engine, kind) + control_bytes(kind);
}

const char *channel_name(const struct channel *channel) { return kind_of(channel) == WIRE_EAGER ? "eager" : "bulk"; }

int channel_fail_verb(const struct channel *channel, const char *verb, int error) {
  char text[VERBS_EXPLANATION_BYTES];
  verbs_explain(verb, error, text, sizeof text);
  return fail(MLXDIST_TRANSPORT, "device %s of provider %s: %s on the %s queue pair of rank %d to rank %d failed: %s",
              channel->device->name, channel->device->verbs->name, verb, channel_name(channel), channel->engine->rank,
              channel->peer->rank, text);
}

int channel_create(struct channel *channel, struct engine *engine, struct peer *peer, const struct link *link,
                   uint32_t index, char *memory) {
  enum wire_channel kind = index % 2;
  uint32_t slots = slots_of(engine, kind), slot_bytes = slot_bytes_of(engine, kind);
  uint64_t half = (uint64_t)slots * slot_bytes;
  *channel = (struct channel){.engine = engine,
                              .peer = peer,
                              .link = link,
                              .device = link->device,
                              .index = index,
                              .slot_bytes = slot_bytes,
                              .slots = slots,
                              .reserve = kind == WIRE_EAGER ? CHANNEL_CONTROL_SLOTS : 0,
                              .control = memory,
                              .send_slots = memory + control_bytes(kind),
                              .receive_slots = memory + control_bytes(kind) + half,
                              .kept = calloc(slots, sizeof(struct kept_message)),
                              .arrivals = calloc(slots, sizeof(struct arrival))};
  channel->sent = channel->acked = channel->received = channel->told_ack = WIRE_START;
  channel->seen_acked = channel->seen_received = WIRE_START;
  channel->asked_after = WIRE_START - 1;
  if (!channel->arrivals || !channel->kept)
    return fail(MLXDIST_RESOURCES, "out of memory for a queue pair to rank %d", peer->rank);
  /* The peer has as many slots (its address says so). */
  channel->credit = WIRE_START + slots - channel->reserve;
  for (uint32_t slot = 0; slot < slots; slot++) {
    char *bytes = channel->receive_slots + (uint64_t)slot * slot_bytes;
    channel->arrivals[slot] = (struct arrival){.channel = channel, .bytes = bytes, .posted = true};
  }
  return queue_pair_create(channel);
}

void channel_destroy(struct channel *channel) {
  if (channel->qp) device_destroy_qp(channel->device, channel->qp);
  free(channel->arrivals);
  free(channel->kept);
  *channel = (struct channel){0};
}

/* Receives that data may use. Those of control messages are posted again at once, so this never shrinks. */
uint32_t channel_room(const struct channel *channel) {
  return channel->outstanding > channel->reserve ? channel->outstanding - channel->reserve : 0;
}

int channel_post_all(struct channel *channel) {
  channel->connected = true;
  for (uint32_t slot = 0; slot < channel->slots; slot++) {
    int status = channel->arrivals[slot].posted ? channel_post_receive(channel, slot) : MLXDIST_OK;
    if (status) return status;
  }
  channel->told_credit = channel->received + channel_room(channel);
  return MLXDIST_OK;
}

int channel_reopen(struct channel *channel, uint32_t epoch) {
  int error = device_destroy_qp(channel->device, channel->qp);
  channel->qp = 0;
  if (error) return channel_fail_verb(channel, "destroy_qp", error);
  count(&channel->engine->counters.receives_posted, (uint64_t)-(int64_t)channel->outstanding);
  channel->outstanding = 0;
  channel->completed = channel->requests;
  channel->connected = channel->answered = channel->open = false;
  channel->epoch = epoch;
  return queue_pair_create(channel);
}

static bool has_request(const struct channel *channel) {
  return channel->open && channel->requests - channel->completed < 2 * channel->slots;
}

bool channel_can_send(const struct channel *channel, enum wire_kind kind) {
  uint32_t extra = kind == WIRE_ABORT ? channel->reserve : 0; /* may use what is kept free for it */
  uint32_t next = channel->sent + 1, slots = channel->slots - channel->reserve;
  return wire_at_least(channel->acked + slots + extra, next) && wire_at_least(channel->credit + extra, next) &&
         has_request(channel) && channel_is_clear(channel);
}

/* Whether a work request is not known to have left. One of long ago is not between these two, though numbers wrap. */
static bool is_pending(const struct channel *channel, uint32_t request) {
  return request - channel->completed - 1 < channel->requests - channel->completed;
}

bool channel_is_clear(const struct channel *channel) { return !is_pending(channel, channel->repeated); }

/* The first buffer that an acknowledgement may be written to; control_buffers() where there is none. */
static uint32_t free_buffer(const struct channel *channel) {
  uint32_t buffer = 0, buffers = control_buffers(kind_of(channel));
  while (buffer < buffers && is_pending(channel, channel->control_requests[buffer])) buffer++;
  return buffer;
}

static bool can_acknowledge(const struct channel *channel) {
  return has_request(channel) && free_buffer(channel) < control_buffers(kind_of(channel));
}

bool channel_lacks_completions(const struct channel *channel) {
  return channel->open && channel->acked == channel->sent && !(channel_is_clear(channel) && can_acknowledge(channel));
}

static char *send_slot(const struct channel *channel, uint32_t slot) {
  return channel->send_slots + (uint64_t)slot * channel->slot_bytes;
}

/* What rides on every message: how far all channels from this peer have got. */
static void write_news(struct peer *peer, struct wire_header *header) {
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    struct channel *channel = &peer->channels[i];
    uint32_t free_receives = channel_room(channel);
    header->ack[i] = channel->told_ack = channel->received;
    header->room[i] = (uint16_t)free_receives;
    channel->told_credit = channel->received + free_receives;
    channel->must_tell = false;
    if (channel->wants_resend && header->kind == WIRE_ACK) {
      header->flags |= (uint8_t)(WIRE_RESEND << i);
      channel->wants_resend = false;
      channel->asked_after = channel->received;
    }
  }
}

/* Of a message in two pieces, without the field that it goes to. */
static void seal(const struct channel *channel, char *bytes, uint32_t length, const char *user, uint32_t user_length) {
  if (!channel->engine->options.checksum) return;
  struct wire_header *header = (struct wire_header *)bytes;
  header->checksum = checksum(wire_checksum(bytes, length), user, user_length);
}

static int post(struct channel *channel, struct ibv_sge *list, int entries, bool signaled) {
  signaled |= channel->device->signals_all;
  struct engine_counters *counters = &channel->engine->counters;
  if (channel->rested) {
    bool posts;
    int status = keepalive_wake(channel, &posts);
    if (status || !posts) return status; /* what is not acknowledged goes by another cable */
  }
  channel->requests++;
  if (channel->device->whole_frames) { /* one entry: such a device does not gather */
    count(&counters->padding_bytes_sent, channel->slot_bytes - list->length);
    list->length = channel->slot_bytes;
  }
  struct ibv_send_wr request = {.wr_id = engine_wr_id(channel, true, channel->requests),
                                .sg_list = list,
                                .num_sge = entries,
                                .opcode = IBV_WR_SEND,
                                .send_flags = signaled ? IBV_SEND_SIGNALED : 0},
                     *bad;
  int error = ibv_post_send(channel->qp, &request, &bad);
  if (error) return channel_fail_verb(channel, "post_send", error);
  count(&counters->post_send_calls, 1);
  count(&counters->messages_sent, 1);
  return MLXDIST_OK;
}

/* Sends what stands in a slot. Where it is a repetition its completion has to be known; else one signaled message twice
 * a window is enough: acknowledgements free the slots, completions only the send queue. Errors complete in any case. */
static int post_slot(struct channel *channel, uint32_t slot, bool again) {
  const struct kept_message *kept = &channel->kept[slot];
  char *bytes = send_slot(channel, slot);
  seal(channel, bytes, kept->length, kept->user, kept->user_length);
  struct ibv_sge list[2] = {{.addr = (uintptr_t)bytes, .length = kept->length, .lkey = channel->lkey},
                            {.addr = (uintptr_t)kept->user, .length = kept->user_length, .lkey = kept->user_lkey}};
  bool signaled = again || (channel->requests + 1) % (channel->slots / 2) == 0;
  return post(channel, list, kept->user ? 2 : 1, signaled);
}

static void advance(struct channel *channel) {
  channel->sent++;
  channel->send_slot = channel->send_slot + 1 == channel->slots ? 0 : channel->send_slot + 1;
}

uint32_t channel_oldest_slot(const struct channel *channel) {
  return (channel->send_slot + channel->slots - (channel->sent - channel->acked)) % channel->slots;
}

bool channel_keeps(const struct channel *channel, const char *data, uint64_t bytes) {
  uint32_t slot = channel_oldest_slot(channel);
  for (uint32_t left = channel->sent - channel->acked; left > 0; left--, slot = (slot + 1) % channel->slots) {
    const struct kept_message *kept = &channel->kept[slot];
    if (kept->user && kept->user < data + bytes && data < kept->user + kept->user_length) return true;
  }
  return !channel_is_clear(channel);
}

int channel_send(struct channel *channel, const struct outgoing_message *message) {
  uint32_t slot = channel->send_slot;
  char *bytes = send_slot(channel, slot);
  struct wire_header *header = (struct wire_header *)bytes;
  *header = (struct wire_header){
      .magic = WIRE_MAGIC,
      .kind = (uint8_t)message->kind,
      .flags = message->flags | (message->descriptor ? WIRE_FIRST : 0),
      .group = message->group,
      .sequence = channel->sent + 1,
      .stream = message->stream,
      .offset = message->offset,
      .length = message->length,
      .ready = message->ready,
      .order = message->order,
  };
  write_news(channel->peer, header);
  uint32_t before = sizeof *header;
  if (message->descriptor) {
    memcpy(bytes + before, message->descriptor, sizeof *message->descriptor);
    before += sizeof *message->descriptor;
  }
  bool copies = !message->user_lkey;
  if (copies && message->length) memcpy(bytes + before, message->payload, message->length);
  channel->kept[slot] = copies ? (struct kept_message){.length = before + message->length}
                               : (struct kept_message){.length = before,
                                                       .user = message->payload,
                                                       .user_length = message->length,
                                                       .user_lkey = message->user_lkey};
  int status = post_slot(channel, slot, false);
  if (status) return status;
  debug(DEBUG_TRACE, "message",
        "to rank %d: number %u of the %s queue pair %u: kind %d, stream %u of group %u, byte "
        "%llu, %u bytes%s",
        channel->peer->rank, header->sequence - WIRE_START, channel_name(channel), channel->index / 2, message->kind,
        message->stream - WIRE_START, message->group, (unsigned long long)message->offset, message->length,
        copies ? "" : ", not copied");
  advance(channel);
  struct engine_counters *counters = &channel->engine->counters;
  if (message->kind != WIRE_DATA) count(&counters->control_messages_sent, 1);
  count(&counters->header_bytes_sent, before + (message->counters ? 0 : message->length));
  if (message->counters) count(&message->counters->payload_bytes_sent, message->length);
  if (message->counters && copies) count(&message->counters->bytes_copied, message->length);
  return MLXDIST_OK;
}

int channel_acknowledge(struct channel *channel, uint16_t group, uint32_t ready, uint8_t flags, bool *sent) {
  *sent = false;
  if (!can_acknowledge(channel)) return MLXDIST_OK; /* a later turn will */
  uint32_t buffer = free_buffer(channel);
  struct wire_header *header = (struct wire_header *)(channel->control + buffer * CHANNEL_EAGER_BYTES);
  *header = (struct wire_header){.magic = WIRE_MAGIC, .kind = WIRE_ACK, .flags = flags, .group = group, .ready = ready};
  write_news(channel->peer, header);
  meeting_write(channel->peer, header);
  seal(channel, (char *)header, sizeof *header, 0, 0);
  struct ibv_sge sge = {.addr = (uintptr_t)header, .length = sizeof *header, .lkey = channel->lkey};
  int status = post(channel, &sge, 1, true);
  channel->control_requests[buffer] = channel->requests;
  *sent = true;
  count(&channel->engine->counters.control_messages_sent, 1);
  count(&channel->engine->counters.header_bytes_sent, sizeof *header);
  return status;
}

int channel_resend(struct channel *channel) {
  uint32_t unacked = channel->sent - channel->acked;
  if (!channel_is_clear(channel)) return MLXDIST_OK;
  if (unacked)
    debug(DEBUG_INFO, "message", "%u to rank %d are sent again, from number %u of the %s queue pair %u on", unacked,
          channel->peer->rank, channel->acked + 1 - WIRE_START, channel_name(channel), channel->index / 2);
  uint32_t slot = channel_oldest_slot(channel);
  for (; unacked > 0 && has_request(channel); unacked--, slot = (slot + 1) % channel->slots) {
    write_news(channel->peer, (struct wire_header *)send_slot(channel, slot));
    int status = post_slot(channel, slot, true);
    if (status) return status;
    channel->repeated = channel->requests;
    count(&channel->engine->counters.retransmissions, 1);
  }
  return MLXDIST_OK;
}

int channel_forward(const struct channel *channel, uint32_t slot, struct channel *by) {
  const struct kept_message *from = &channel->kept[slot];
  char *bytes = send_slot(by, by->send_slot);
  struct wire_header *header = (struct wire_header *)bytes;
  memcpy(bytes, send_slot(channel, slot), from->length);
  if (from->user) memcpy(bytes + from->length, from->user, from->user_length);
  header->sequence = by->sent + 1;
  header->flags |= WIRE_AGAIN;
  write_news(by->peer, header);
  by->kept[by->send_slot] = (struct kept_message){.length = from->length + from->user_length};
  int status = post_slot(by, by->send_slot, false);
  if (status) return status;
  advance(by);
  count(&by->engine->counters.retransmissions, 1);
  return MLXDIST_OK;
}

void channel_on_sent(struct channel *channel, uint32_t request) { channel->completed = request; }

bool channel_owes_news(const struct channel *channel, bool lazily) {
  uint32_t slots = channel->slots - channel->reserve, share = lazily ? slots - slots / 4 : slots / 2;
  if (share == 0) share = 1;
  return channel->wants_resend || channel->must_tell || channel->received - channel->told_ack >= share ||
         channel->received + channel_room(channel) - channel->told_credit >= share;
}
