/*
 * A device that misbehaves on purpose, so that tests reach what an unreliable connection does only rarely.
 *
 * `inject` of the verbs table takes a comma-separated list, without spaces, of
 *
 *   drop=1/100       every SEND is lost with this chance
 *   drop_next=3      the next 3 SENDs are lost
 *   drop_after=10    the 10th SEND from now is lost, and it alone
 *   duplicate...     likewise: the SEND is delivered twice, if the peer has a second receive posted
 *   truncate...      its end is missing: the receive completes with fewer bytes; where frames count, it is lost
 *   corrupt...       one bit of what is delivered is wrong
 *   error...         it does not leave and completes with GENERAL_ERR; the queue pair goes to ERR
 *   die...           the process kills itself with SIGKILL instead of sending
 *   delay=500        every SEND leaves N microseconds late,
 *   jitter=200       and up to N more, drawn for each
 *   link=down        every SEND is lost and the port is DOWN, as with a pulled cable, until link=up
 *   idle=200         a queue pair that has carried nothing, either way, for more than N milliseconds loses every
 *                    SEND from then on, while the port stays ACTIVE, as Thunderbolt's do after about 23 minutes; a new
 *                    queue pair works
 *   lose=1/100       poll_cq leaves a completion out, of a SEND or a receive that has succeeded, with this chance, or
 *                    lose_next, lose_after: these count completions
 *   bridge=on        the port is part of a bridge, and going to RTR fails, as on Thunderbolt, until bridge=off
 *   seed=7           the generator behind the chances starts over: the same seed and SENDs give the same faults
 *   none             ends all faults, those to its left too; the generator stays where it is
 *
 * What a list does not name stays as it was; what it names twice is as named last; 0 (0/1 for a chance) ends one
 * fault. Numbers are decimal and below 2^32; a chance is at most 1. A list with anything else changes nothing.
 *
 * Faults belong to the device context that sends, and count the SENDs of all its queue pairs. A lost SEND completes
 * successfully and takes no receive of the peer: nothing but the counters shows that it was meant to be lost. A SEND
 * that fails locally is not counted. Where several faults hit one SEND, die comes before error before drop.
 *
 * An RDMA_WRITE is a SEND here, but always arrives as it was: truncate and corrupt leave it alone.
 *
 * There is no thread: a late SEND stays in its queue, with those behind it, and leaves at the first post_send to the
 * queue pair or poll_cq of the context after its time. It completes when it leaves; until then its memory is in use.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* In this order they draw from the generator. */
enum soft_fault {
  SOFT_FAULT_DROP,
  SOFT_FAULT_DUPLICATE,
  SOFT_FAULT_TRUNCATE,
  SOFT_FAULT_CORRUPT,
  SOFT_FAULT_ERROR,
  SOFT_FAULT_DIE,
  SOFT_FAULTS, /* that hit SENDs; and */
  SOFT_FAULT_LOSE = SOFT_FAULTS,
  SOFT_RULES,
};

/* Which SENDs, or completions, one kind of fault hits. */
struct soft_rule {
  uint32_t times, of; /* the chance; `of` is never 0 where `times` is not */
  uint32_t next;
  uint32_t after;
};

struct soft_faults {
  bool any; /* all that the way of a message without faults looks at */
  bool link_down;
  bool bridged;
  struct soft_rule rules[SOFT_RULES];
  uint32_t delay_us;
  uint32_t jitter_us;
  uint32_t idle_ms;
  uint64_t generator;
};

/* 0, or EINVAL and no change. */
int soft_faults_set(struct soft_faults* faults, const char* list);

/* What happens to the next SEND: a bit for each soft_fault. */
unsigned soft_faults_next(struct soft_faults* faults);

/* Whether the next completion is lost. */
bool soft_faults_lose_completion(struct soft_faults* faults);

/* How late the next SEND leaves. */
uint64_t soft_faults_late_ns(struct soft_faults* faults);

/* A number below `limit`, which is not 0. */
uint64_t soft_faults_draw(struct soft_faults* faults, uint64_t limit);
