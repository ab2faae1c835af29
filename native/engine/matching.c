#include "matching.h"

#include "error.h"
#include "label.h"
#include "layout.h"
#include "operation.h"
#include "receive.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define LABEL_BYTES 128

static struct layout_name name_of(const struct wire_descriptor *descriptor, uint16_t group) {
  struct layout_name name = layout_name(descriptor, 0);
  size_t used = strlen(name.text);
  snprintf(name.text + used, sizeof name.text - used, "%s", group_name(group).text);
  return name;
}

/* One of the two is at the end of its program: no advice about dtypes helps there. */
static int fail_at_the_end(int32_t ended, int32_t other, const char *operation) {
  return fail(MLXDIST_MISMATCH,
              "ranks disagree: rank %d calls finalize, at the end of its program, and rank %d calls %s; all ranks must "
              "call the same operations: look for a loop that runs less often on rank %d, such as over fewer batches, "
              "or for a branch by rank",
              ended, other, operation, ended);
}

int matching_fail(const struct operation *ours, const struct peer *peer, const struct wire_header *header,
                  const struct wire_descriptor *theirs, uint64_t expected_bytes) {
  char sizes[256] = "", ours_label[LABEL_BYTES] = "", theirs_label[LABEL_BYTES] = "";
  struct layout_name ours_name = name_of(&ours->receives, ours->group->id);
  struct layout_name theirs_name = name_of(theirs, ours->group->id);
  int32_t rank = ours->group->engine->rank;
  bool first = rank < peer->endpoint.rank; /* in rank order, so that both ranks say the same */
  bool same_operation = theirs->operation == ours->receives.operation;
  if (!same_operation && theirs->operation == WIRE_FINALIZE)
    return fail_at_the_end(peer->endpoint.rank, rank, ours_name.text);
  if (!same_operation && ours->receives.operation == WIRE_FINALIZE)
    return fail_at_the_end(rank, peer->endpoint.rank, theirs_name.text);
  if (!label_matches(ours->label, header->label)) {
    label_describe(ours->label, ours_label, sizeof ours_label);
    label_describe(header->label, theirs_label, sizeof theirs_label);
  }
  if (!strcmp(ours_name.text, theirs_name.text) &&
      memcmp(ours->receives.shape, theirs->shape, sizeof theirs->shape) != 0)
    snprintf(
        sizes, sizeof sizes, "%s",
        theirs->operation == WIRE_SEND
            ? ", of different calls of a model in stages, or with different inputs: give all stages the same prompts, "
              "and seed them alike before they sample (mx.random.seed(0))"
            : ", packed from trees that differ in paths, shapes or dtypes, or of different calls of a model in "
              "stages");
  else if (same_operation && theirs->algorithm != ours->receives.algorithm)
    snprintf(sizes, sizeof sizes, " with different algorithms: set MLXDIST_ALGO and the tuning table alike on all");
  else if (expected_bytes != UINT64_MAX && theirs->bytes != expected_bytes)
    snprintf(sizes, sizeof sizes, ", and rank %d sends %llu bytes where rank %d expects %llu", peer->endpoint.rank,
             (unsigned long long)theirs->bytes, rank, (unsigned long long)expected_bytes);
  /* With another algorithm a rank may need nothing of an operation, and be at the next one. */
  return fail(MLXDIST_MISMATCH,
              "ranks disagree: rank %d calls %s%s, rank %d calls %s%s%s; all ranks must call the same "
              "operations in the same order with the same dtype and shape%s%s",
              first ? rank : peer->endpoint.rank, first ? ours_name.text : theirs_name.text,
              first ? ours_label : theirs_label, first ? peer->endpoint.rank : rank,
              first ? theirs_name.text : ours_name.text, first ? theirs_label : ours_label, sizes,
              same_operation ? "" : ", by the same algorithm (MLXDIST_ALGO)",
              (ours->label ^ header->label) >> LABEL_THREAD_SHIFT && *ours_label
                  ? "; threads that use one group at the same time need a lane each (Group.lane)"
                  : "");
}

static inline struct group_peer *group_peer_of(const struct peer *peer, uint16_t id) {
  const mlxdist_group *group = engine_group(peer->engine, id);
  int32_t member = group ? group->member_of[peer->endpoint.rank] : -1;
  return member < 0 ? 0 : &group->peers[member];
}

static bool clear(const struct operation *operation, const struct group_peer *group_peer, uint32_t place,
                  uint16_t index) {
  bool found = false;
  for (int i = 0; i < operation->out.count; i++) {
    struct transfer *transfer = &operation->out.list[i];
    bool same = (transfer->index == WIRE_MESSAGE) == (index == WIRE_MESSAGE);
    if (transfer->group_peer != group_peer || transfer->place != place || !same) continue;
    transfer->cleared = found = true;
  }
  return found;
}

static bool is_issued(const mlxdist_group *group, const struct places *messages, uint32_t place, uint16_t index) {
  return places_has_issued(index == WIRE_MESSAGE ? messages : &group->collectives, place);
}

/* Perhaps before it is sent here. */
void matching_on_cts(struct peer *peer, const struct wire_header *header) {
  const mlxdist_group *group = engine_group(peer->engine, header->group);
  const struct group_peer *group_peer = group_peer_of(peer, header->group);
  if (!group_peer) return;
  struct operation *operation = peer->engine->active;
  while (operation && !(operation->group == group && clear(operation, group_peer, header->cts, header->index)))
    operation = operation->next;
  if (operation || is_issued(group, &group_peer->sends, header->cts, header->index)) return;
  uint16_t index = header->index == WIRE_MESSAGE ? WIRE_MESSAGE : 0;
  struct peer_cts cts = {.group = header->group, .index = index, .place = header->cts};
  for (uint32_t i = 0; i < peer->early_count; i++)
    if (!memcmp(&peer->early_cts[i], &cts, sizeof cts)) return;
  if (peer->early_count == PEER_EARLY_CTS)
    memmove(peer->early_cts, peer->early_cts + 1, --peer->early_count * sizeof cts);
  peer->early_cts[peer->early_count++] = cts;
}

void matching_take_early_cts(struct transfer *transfer) {
  struct peer *peer = transfer->group_peer->peer;
  uint32_t kept = 0;
  for (uint32_t i = 0; i < peer->early_count; i++) {
    const struct peer_cts *cts = &peer->early_cts[i];
    bool same = cts->group == transfer->operation->group->id && cts->place == transfer->place &&
                (cts->index == WIRE_MESSAGE) == (transfer->index == WIRE_MESSAGE);
    if (same)
      transfer->cleared = true;
    else
      peer->early_cts[kept++] = *cts;
  }
  peer->early_count = kept;
}

int matching_send_cts(const struct transfer *transfer) {
  struct peer *peer = transfer->group_peer->peer;
  struct peer_cts cts = {.group = transfer->operation->group->id,
                         .index = transfer->index == WIRE_MESSAGE ? WIRE_MESSAGE : 0,
                         .place = transfer->place};
  bool other = peer->cts_pending && memcmp(&peer->cts, &cts, sizeof cts) != 0;
  int status = other ? endpoint_flush(&peer->endpoint, false) : MLXDIST_OK;
  peer->has_cts = peer->cts_pending = peer->endpoint.ack_requested = true;
  peer->cts = cts;
  endpoint_mark_ack(&peer->endpoint);
  return status;
}

static inline bool is_for(const struct recv_desc *desc, const struct transfer *transfer) {
  const struct wire_header *header = recv_header(desc);
  return header->place == transfer->place && header->index == transfer->index &&
         header->group == transfer->operation->group->id;
}

/* Messages of one channel come in order; those of two links may overtake each other. */
static void insert(struct transfer *transfer, struct recv_desc *desc) {
  uint64_t offset = recv_header(desc)->offset;
  struct recv_desc **place = &transfer->arrived;
  while (*place && recv_header(*place)->offset <= offset) place = &(*place)->next;
  desc->next = *place;
  *place = desc;
  if (!desc->next) transfer->arrived_last = desc;
}

static inline void attach(struct transfer *transfer, struct recv_desc *desc) {
  if (transfer->arrived) {
    insert(transfer, desc);
    return;
  }
  desc->next = 0;
  transfer->arrived = transfer->arrived_last = desc;
}

/* The operation in that place of the group, NULL if it has ended. */
static const struct operation *issued_as(const mlxdist_group *group, uint32_t place) {
  const struct operation *operation = group->engine->active;
  while (operation && !(operation->group == group && operation_is_collective(operation) && operation->place == place))
    operation = operation->next;
  return operation;
}

/* No transfer expects this message. That is a mistake if this rank has issued another operation in that place of the
 * group. What it does in other groups is not looked at: another thread may do it. */
static int check_order(const struct peer *peer, const struct recv_desc *desc) {
  const struct wire_header *header = recv_header(desc);
  const struct wire_descriptor *theirs = recv_descriptor(desc);
  const struct engine *engine = peer->engine;
  const mlxdist_group *group = engine_group(engine, header->group);
  const struct group_peer *group_peer = group_peer_of(peer, header->group);
  if (!group_peer || !is_issued(group, &group_peer->receives, header->place, header->index)) return MLXDIST_OK;
  const struct operation *ours = header->index == WIRE_MESSAGE ? 0 : issued_as(group, header->place);
  /* The same call on both sides, but not the transfer that is due: what came before it differs, and is about to be
   * seen.
   */
  if (ours && (!theirs || !memcmp(&ours->receives, theirs, offsetof(struct wire_descriptor, bytes)))) return MLXDIST_OK;
  if (ours) return matching_fail(ours, peer, header, theirs, UINT64_MAX);
  if (!theirs || header->index == WIRE_MESSAGE)
    return fail(MLXDIST_TRANSPORT, "rank %d received %u bytes of operation %u from rank %d, which has ended already",
                engine->rank, header->length, header->place - WIRE_START, peer->endpoint.rank);
  return fail(MLXDIST_MISMATCH,
              "ranks disagree: rank %d calls %s, and what rank %d called at that point needs nothing "
              "from it; all ranks of a group must call its collectives in the same order, with the same root and the "
              "same algorithm (MLXDIST_ALGO)",
              peer->endpoint.rank, name_of(theirs, header->group).text, engine->rank);
}

/* Whether a message that may have left by several links has come by another one already. */
static bool is_known(const struct peer *peer, const struct transfer *transfer, const struct recv_desc *desc) {
  const struct wire_header *header = recv_header(desc);
  const struct recv_desc *other = transfer ? transfer->arrived : peer->unexpected;
  for (; other; other = other->next) {
    const struct wire_header *theirs = recv_header(other);
    if (theirs->group == header->group && theirs->place == header->place && theirs->index == header->index &&
        theirs->offset == header->offset)
      return true;
  }
  if (transfer) return transfer->started && header->offset < transfer->done + !transfer->bytes;
  const struct group_peer *group_peer = group_peer_of(peer, header->group);
  return group_peer &&
         is_issued(engine_group(peer->engine, header->group), &group_peer->receives, header->place, header->index);
}

/* Whether a message should leave its slot: data that no transfer takes now would keep others from getting past. Such is
 * what is unexpected, what belongs to an operation that waits for another rank, and what has overtaken a message
 * on another link, which may be lost there and then come by this one. */
static bool should_spill(const struct peer *peer, const struct recv_desc *desc, const struct transfer *transfer) {
  if (!receive_is_crowded(desc->channel)) return false;
  if (!transfer || peer->engine->active_count > 1) return true;
  const struct recv_desc *first = transfer->arrived ? transfer->arrived : desc;
  return peer->endpoint.channel_count > 2 && recv_header(first)->offset > transfer->done;
}

static bool may_repeat(const struct peer *peer, const struct recv_desc *desc) {
  return recv_header(desc)->flags & WIRE_FAILOVER || peer->endpoint.repeating >> desc->channel->index & 1;
}

int matching_deliver(struct peer *peer, struct recv_desc *desc) {
  if (recv_header(desc)->flags & WIRE_CTS) matching_on_cts(peer, recv_header(desc));
  struct transfer *transfer = peer->posted;
  while (transfer && !is_for(desc, transfer)) transfer = transfer->next;
  int status = MLXDIST_OK;
  if (may_repeat(peer, desc) && is_known(peer, transfer, desc)) return recv_release(desc);
  if (!transfer) status = check_order(peer, desc);
  if (!status && should_spill(peer, desc, transfer)) status = recv_spill(&desc);
  if (transfer) {
    attach(transfer, desc);
    return status;
  }
  desc->next = 0;
  if (peer->unexpected)
    peer->unexpected_last->next = desc;
  else
    peer->unexpected = desc;
  peer->unexpected_last = desc;
  peer->engine->unexpected_count++;
  return status;
}

static void take_unexpected(struct peer *peer, struct transfer *transfer) {
  struct recv_desc **place = &peer->unexpected, *last = 0;
  while (*place) {
    struct recv_desc *desc = *place;
    if (is_for(desc, transfer)) {
      *place = desc->next;
      attach(transfer, desc);
      peer->engine->unexpected_count--;
      continue;
    }
    last = desc;
    place = &desc->next;
  }
  peer->unexpected_last = last;
}

void matching_post(struct transfer *transfer) {
  struct peer *peer = transfer->group_peer->peer;
  transfer->next = 0;
  if (peer->posted)
    peer->posted_last->next = transfer;
  else
    peer->posted = transfer;
  peer->posted_last = transfer;
  if (peer->unexpected) take_unexpected(peer, transfer);
}

int matching_check_unexpected(const struct peer *peer) {
  int status = MLXDIST_OK;
  for (const struct recv_desc *desc = peer->unexpected; desc && !status; desc = desc->next)
    status = check_order(peer, desc);
  return status;
}

static int spill_held(struct transfer *transfer) {
  int status = MLXDIST_OK;
  for (struct recv_desc **place = &transfer->arrived; *place && !status; place = &(*place)->next) {
    struct recv_desc *next = (*place)->next;
    if ((*place)->on_heap || !receive_is_crowded((*place)->channel)) continue;
    status = recv_spill(place);
    (*place)->next = next;
    if (!next) transfer->arrived_last = *place;
  }
  return status;
}

int matching_free_slots(struct peer *peer) {
  if (!peer->posted) return MLXDIST_OK;
  if (peer->endpoint.channel_count <= 2 && peer->engine->active_count <= 1) return MLXDIST_OK;
  int status = MLXDIST_OK;
  for (struct transfer *transfer = peer->posted; transfer && !status; transfer = transfer->next)
    status = spill_held(transfer);
  return status;
}

int matching_remove(struct transfer *transfer) {
  struct peer *peer = transfer->group_peer->peer;
  struct transfer **place = &peer->posted, *before = 0;
  while (*place && *place != transfer) {
    before = *place;
    place = &before->next;
  }
  if (*place) {
    *place = transfer->next;
    if (peer->posted_last == transfer) peer->posted_last = before;
  }
  int status = MLXDIST_OK;
  while (transfer->arrived) {
    struct recv_desc *desc = transfer->arrived;
    transfer->arrived = desc->next;
    int released = recv_release(desc);
    if (!status) status = released;
  }
  return status;
}
