#include "meeting.h"

#include "operation.h"

void meeting_init(struct meeting *meeting) {
  for (int kind = 0; kind < MEETING_KINDS; kind++) {
    atomic_init(&meeting->arrived[kind], WIRE_START);
    atomic_init(&meeting->there[kind], WIRE_START);
    meeting->announced[kind] = WIRE_START;
  }
  atomic_init(&meeting->received, WIRE_START);
  atomic_init(&meeting->until, 3 * WIRE_START + MEETING_OPERATIONS);
}

uint32_t meeting_total(const struct meeting *meeting) {
  return meeting->arrived[MEETING_COLLECTIVES] + meeting->arrived[MEETING_SENDS] + meeting->received;
}

uint32_t meeting_left(const struct meeting *meeting, uint32_t until) { return until - meeting_total(meeting); }

bool meeting_owes(const struct meeting *meeting, int kind) {
  return meeting->requests >> kind & 1 && wire_at_least(meeting->arrived[kind], meeting->requested[kind]);
}

void meeting_forget_answered(struct meeting *meeting) {
  for (int kind = 0; kind < MEETING_KINDS; kind++)
    if (meeting_owes(meeting, kind)) atomic_fetch_and(&meeting->requests, ~(1u << kind));
}

uint32_t meeting_until(const struct meeting *meeting) {
  uint32_t left = meeting_left(meeting, meeting->until);
  return left > MEETING_OPERATIONS ? meeting_total(meeting) : meeting->until;
}

static void heard(struct peer *peer, uint64_t now) {
  peer->meeting.heard_ns = now;
  peer->signs_of_life++;
}

void meeting_heard(const struct operation *operation, uint64_t now) {
  /* None of these ends before all members have come to it, whichever the messages went by. */
  const uint32_t joint = 1u << MLXDIST_ALL_REDUCE | 1u << MLXDIST_ALL_GATHER | 1u << MLXDIST_REDUCE_SCATTER |
                         1u << MLXDIST_BARRIER | 1u << MLXDIST_ALL_TO_ALL;
  const mlxdist_group *group = operation->group;
  if (joint >> operation->sends.operation & 1) {
    for (int32_t member = 0; member < group->size; member++)
      if (group->peers[member].peer) heard(group->peers[member].peer, now);
    return;
  }
  for (int i = 0; i < operation->in.count; i++) heard(operation->in.list[i].group_peer->peer, now);
}

void meeting_take_counts(struct meeting *meeting, const uint32_t *counts, uint32_t until) {
  for (int kind = 0; kind < MEETING_KINDS; kind++)
    if (wire_at_least(counts[kind], meeting->there[kind])) meeting->there[kind] = counts[kind];
  uint32_t left = meeting_left(meeting, until), own = meeting_left(meeting, meeting->until);
  if (left <= 2 * MEETING_OPERATIONS && (own > 2 * MEETING_OPERATIONS || left > own)) meeting->until = until;
}

void meeting_take_request(struct meeting *meeting, uint64_t request) {
  uint32_t number = (uint32_t)(request >> 32);
  int kind = request & MEETING_OF_SENDS ? MEETING_SENDS : MEETING_COLLECTIVES;
  if (!(request & MEETING_REPEATS) && wire_at_least(meeting->announced[kind], number)) return;
  meeting->waiting = request & ((1u << MEETING_SET_BITS) - 1);
  bool is_lower = !(meeting->requests >> kind & 1) || wire_at_least(meeting->requested[kind], number);
  if (is_lower) meeting->requested[kind] = number;
  atomic_fetch_or(&meeting->requests, 1u << kind);
}

void meeting_read(struct meeting *meeting, const struct wire_header *header) {
  const uint32_t counts[MEETING_KINDS] = {header->sequence, (uint32_t)header->label};
  meeting_take_counts(meeting, counts, header->place);
  if (header->flags & WIRE_MEET) meeting_take_request(meeting, header->offset);
}

bool meeting_write(struct meeting *meeting, struct wire_header *header) {
  bool requests = header->flags & WIRE_MEET, answers = meeting_owes_response(meeting);
  meeting_forget_answered(meeting);
  for (int kind = 0; kind < MEETING_KINDS; kind++) meeting->announced[kind] = meeting->arrived[kind];
  header->sequence = meeting->announced[MEETING_COLLECTIVES];
  header->label = meeting->announced[MEETING_SENDS];
  header->place = meeting_until(meeting);
  if (requests) header->offset = meeting->request;
  return requests || answers;
}
