#include "transfer.h"

#include "credit.h"
#include "error.h"
#include "label.h"
#include "matching.h"
#include "operation.h"
#include "receive.h"

#include <string.h>

static inline uint64_t at_most(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline bool is_small(const struct transfer *transfer) {
  return transfer->bytes <= CHANNEL_EAGER_BYTES - CHANNEL_OVERHEAD;
}

/* The same on both sides: pieces of a transfer are as large as a slot allows. */
static inline uint64_t piece_bytes(const struct transfer *transfer) {
  uint32_t bulk = transfer->operation->group->engine->options.bulk_slot_bytes;
  return (is_small(transfer) ? CHANNEL_EAGER_BYTES : bulk) - CHANNEL_OVERHEAD;
}

/* Links that its pieces may take. */
static inline uint32_t links_of(const struct transfer *transfer) {
  return transfer->group_peer->peer->endpoint.channel_count / 2;
}

static uint32_t on_their_way(const struct channel *channel) { return channel->sent - channel->acked; }

static bool is_less_busy(const struct channel *a, const struct channel *b) {
  if (on_their_way(a) != on_their_way(b)) return on_their_way(a) < on_their_way(b);
  return !wire_at_least(a->sent, b->sent);
}

/* The channel for the next piece: of several links the one with the fewest messages on their way, or so far. So a
 * transfer of several pieces is striped. Pieces fill a slot: smaller ones for the sake of more links cost more than
 * they gain wherever it was measured (docs/architecture.md), and no less than a whole slot where the device counts
 * frames. */
static struct channel *channel_of(const struct transfer *transfer) {
  struct endpoint *endpoint = &transfer->group_peer->peer->endpoint;
  if (is_small(transfer)) return endpoint_eager(endpoint);
  struct channel *best = 0;
  for (uint32_t i = WIRE_BULK; i < endpoint->channel_count; i += 2) {
    struct channel *channel = &endpoint->channels[i];
    if (link_is_dead(endpoint, i / 2)) continue;
    if (!best || is_less_busy(channel, best)) best = channel;
  }
  return best;
}

static bool may_send(const struct transfer *transfer, const struct channel *channel) {
  return (transfer->done < transfer_eager_limit(transfer->operation->group->engine) || transfer_is_cleared(transfer)) &&
         channel_can_send(channel, WIRE_DATA);
}

/* Where the result takes their place, each result waits until its piece is confirmed. While several others are on their
 * way through memory that costs less than a copy; else pieces are copied, even from registered memory. */
#define IN_PLACE_PIECES 4

static bool leaves_uncopied(const struct transfer *transfer, const struct channel *channel, bool in_place) {
  if (!transfer->region || !in_place) return transfer->region;
  const struct verbs *verbs = channel->device->verbs;
  return transfer->bytes >= IN_PLACE_PIECES * piece_bytes(transfer) && verbs->is_by_memory &&
         verbs->is_by_memory(channel->qp);
}

/* Whether a message is exchanged for one of the same peer. */
static bool receives_from(const struct operation *operation, const struct transfer *transfer) {
  return transfer->index == WIRE_MESSAGE && operation->in.count &&
         operation->in.list[0].group_peer == transfer->group_peer;
}

/* Sends the next piece, if there is a slot and a receive for it. */
static int push(struct operation *operation, struct transfer *transfer, bool in_place, bool *progressed) {
  if (transfer->started && transfer->done == transfer->bytes) return MLXDIST_OK;
  struct channel *channel = channel_of(transfer);
  if (!may_send(transfer, channel)) return MLXDIST_OK;
  uint64_t piece = piece_bytes(transfer), left = transfer->bytes - transfer->done;
  struct wire_descriptor descriptor;
  struct outgoing_message message = {
      .kind = WIRE_DATA,
      .group = operation->group->id,
      .index = transfer->index,
      .place = transfer->place,
      .offset = transfer->done,
      .label = operation->label,
      .payload = transfer->data ? transfer->data + transfer->done : 0, /* a barrier sends nothing */
      .length = (uint32_t)at_most(left, piece),
  };
  if (receives_from(operation, transfer)) {
    message.flags = WIRE_CTS;
    message.cts = operation->receive_place;
  }
  if (!transfer->started) {
    descriptor = operation->sends;
    descriptor.bytes = transfer->bytes;
    message.descriptor = &descriptor;
  }
  if (leaves_uncopied(transfer, channel, in_place))
    message.user_lkey = mr_cache_lkey(transfer->region, channel->device, message.payload, message.length);
  if (message.user_lkey && left <= piece * links_of(transfer)) message.flags |= WIRE_ACK_REQ;
  int status = channel_send(channel, &message);
  struct group_counters *counters = operation->group->counters;
  count(&counters->payload_bytes_sent, message.length);
  if (!message.user_lkey) count(&counters->bytes_copied, message.length);
  if (message.user_lkey) {
    transfer->last_from_region[channel->index] = channel->sent;
    transfer->from_region |= 1u << channel->index;
  }
  transfer->started = true;
  transfer->done += message.length;
  *progressed = true;
  return status;
}

static bool describes(const struct wire_descriptor *a, const struct wire_descriptor *b, uint64_t bytes) {
  return b->bytes == bytes && memcmp(a, b, offsetof(struct wire_descriptor, bytes)) == 0;
}

/* The first message of the transfer says what the peer is doing. */
static int check_first(struct operation *operation, struct transfer *transfer, const struct recv_desc *desc) {
  const struct peer *peer = transfer->group_peer->peer;
  const struct wire_header *header = recv_header(desc);
  const struct wire_descriptor *theirs = recv_descriptor(desc);
  if (!theirs || header->offset != 0)
    return fail(MLXDIST_TRANSPORT, "rank %d received transfer %u of operation %u from rank %d without its beginning",
                operation->group->engine->rank, transfer->index, transfer->place - WIRE_START, peer->endpoint.rank);
  if (!describes(&operation->receives, theirs, transfer->bytes) || !label_matches(operation->label, header->label))
    return matching_fail(operation, peer, recv_header(desc), theirs, transfer->bytes);
  transfer->started = true;
  return MLXDIST_OK;
}

/* The next piece of the transfer, checked to be the one that is due; NULL if it has not arrived. */
static int next_piece(struct operation *operation, struct transfer *transfer, struct recv_desc **desc) {
  *desc = transfer->arrived;
  if (!*desc) return MLXDIST_OK;
  const struct wire_header *header = recv_header(*desc);
  if (header->offset > transfer->done && transfer->group_peer->peer->endpoint.channel_count > 2) {
    *desc = 0; /* it has overtaken another one, which comes by another link */
    return MLXDIST_OK;
  }
  if (!transfer->started) {
    int status = check_first(operation, transfer, *desc);
    if (status) return status;
  }
  if (header->offset == transfer->done &&
      header->length == at_most(transfer->bytes - transfer->done, piece_bytes(transfer)))
    return MLXDIST_OK;
  return fail(MLXDIST_TRANSPORT,
              "rank %d expected operation %u at byte %llu from rank %d and received byte %llu (%u "
              "bytes)",
              operation->group->engine->rank, transfer->place - WIRE_START, (unsigned long long)transfer->done,
              transfer->group_peer->peer->endpoint.rank, (unsigned long long)header->offset, header->length);
}

static inline int release_piece(struct operation *operation, struct transfer *transfer) {
  struct recv_desc *desc = transfer->arrived;
  uint32_t length = recv_header(desc)->length;
  transfer->arrived = desc->next;
  transfer->done += length;
  count(&operation->group->counters->payload_bytes_received, length);
  return recv_release(desc);
}

/* Copies the next piece of a transfer to its place. */
static int pull(struct operation *operation, struct transfer *transfer, bool *progressed) {
  if (transfer_is_done(transfer)) return MLXDIST_OK;
  struct recv_desc *desc;
  int status = next_piece(operation, transfer, &desc);
  if (status || !desc) return status;
  uint32_t length = recv_header(desc)->length;
  if (length) memcpy(transfer->data + transfer->done, recv_payload(desc), length);
  count(&operation->group->counters->bytes_copied, length);
  *progressed = true;
  return release_piece(operation, transfer);
}

/* Whether all transfers have sent as much as the reduction has with its next piece, and none may have to send again
 * from where that goes. Pieces behind it may be on their way. */
static bool may_overwrite(const struct operation *operation, const struct round *round, uint32_t length) {
  const char *to = round->reduce.out + round->reduce.done;
  for (int i = round->first_out; i < round->first_out + round->outs; i++) {
    const struct transfer *transfer = &operation->out.list[i];
    if (transfer->done < at_most(round->reduce.done + length, transfer->bytes)) return false;
    for (uint32_t c = 0; transfer->from_region >> c; c++)
      if (transfer->from_region >> c & 1 &&
          channel_references(&transfer->group_peer->peer->endpoint.channels[c], to, length))
        return false;
  }
  return true;
}

/* Reduces the next piece once every peer's has arrived. */
static int reduce_piece(struct operation *operation, struct round *round, bool *progressed) {
  struct reduce_step *step = &round->reduce;
  struct transfer *in = &operation->in.list[round->first_in];
  if (transfer_is_done(&in[round->ins - 1])) return MLXDIST_OK;
  const void *sources[MLXDIST_MAX_RANKS];
  uint32_t length = 0;
  int n = 0;
  for (int i = 0; i < round->ins; i++) {
    struct recv_desc *desc;
    int status = next_piece(operation, &in[i], &desc);
    if (status || !desc) return status;
    if (i == step->own_position) sources[n++] = step->own + step->done;
    sources[n++] = recv_payload(desc);
    length = recv_header(desc)->length;
  }
  if (n == round->ins) sources[n++] = step->own + step->done;
  if (step->in_place && !may_overwrite(operation, round, length)) return MLXDIST_OK;
  if (length) step->kernel(step->out + step->done, sources, n, length / step->element_bytes);
  step->done += length;
  *progressed = true;
  for (int i = 0; i < round->ins; i++) {
    int status = release_piece(operation, &in[i]);
    if (status) return status;
  }
  return MLXDIST_OK;
}

static bool is_over(const struct operation *operation, const struct round *round) {
  for (int i = 0; i < round->ins; i++)
    if (!transfer_is_done(&operation->in.list[round->first_in + i])) return false;
  for (int i = 0; i < round->outs; i++)
    if (!transfer_is_sent(&operation->out.list[round->first_out + i])) return false;
  return true;
}

static int step_round(struct operation *operation, struct round *round, bool *progressed) {
  int status = MLXDIST_OK;
  if (!round->begun && round->copy_bytes) {
    memcpy(round->copy_to, round->copy_from, round->copy_bytes);
    count(&operation->group->counters->bytes_copied, round->copy_bytes);
  }
  round->begun = true;
  bool in_place = round->reduces && round->reduce.in_place;
  for (int i = 0; i < round->outs && !status; i++)
    status = push(operation, &operation->out.list[round->first_out + i], in_place, progressed);
  if (round->reduces && round->ins > 0 && !status) status = reduce_piece(operation, round, progressed);
  for (int i = 0; i < round->ins && !status && !round->reduces; i++)
    status = pull(operation, &operation->in.list[round->first_in + i], progressed);
  return status;
}

/* All data has come, but a peer that sent some of it has failed in this very operation: so does this rank. */
static int check_aborted(const struct operation *operation) {
  for (int i = 0; i < operation->in.count; i++) {
    const struct transfer *transfer = &operation->in.list[i];
    const struct peer *peer = transfer->group_peer->peer;
    bool here = peer->failed && peer->failed_group == operation->group->id &&
                peer->failed_in_message == (transfer->index == WIRE_MESSAGE);
    if (here && wire_at_least(transfer->place, peer->failed_from))
      return failure_check(&operation->group->engine->failure);
  }
  return MLXDIST_OK;
}

int operation_step(struct operation *operation, bool *progressed) {
  bool got_on = false;
  int status = MLXDIST_OK;
  while (operation->current < operation->round_count && !status) {
    struct round *round = &operation->rounds[operation->current];
    status = step_round(operation, round, &got_on);
    if (status || !is_over(operation, round)) break;
    operation->current++;
    got_on = true;
  }
  if (got_on) {
    operation->progress_count++;
    operation->group->engine->progress_count++;
    *progressed = true;
  }
  if (status || operation->current < operation->round_count) return status;
  status = check_aborted(operation);
  if (!status) operation_end(operation, MLXDIST_OK);
  return status;
}
