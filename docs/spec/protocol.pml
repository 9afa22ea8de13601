/* How versions get from a sender into workers: ../explanation/protocol.md, as a model that Spin searches.
 *
 * A sender writes versions to slots and offers them; each receiver stages the newest one, commits
 * it and answers. Receivers come late, miss versions, leave, die, are cut off and are replaced;
 * answers come late and twice. Every order of these steps is searched. A promise that does not hold
 * is a violated assertion of its name:
 *
 *   whole_versions   no version is torn: both halves of what is committed are of one version
 *   forward_only     versions only grow in a receiver
 *   honest_answers   no worker is called current that lacks anything
 *   sends_end        every send ends
 *   up_to_date       a worker that is not cut off has the newest version, without another send
 *   next_send_works  a slot is free, whatever the workers do
 *
 *   spin -a protocol.pml && gcc -DSAFETY -o pan pan.c && ./pan
 *
 * With TRACE, the search is for an order of these steps in which a recorded history can have come
 * about: `rejected` is violated where there is one. tests/kit/test_traces.py writes the history.
 */
#ifndef VERSIONS
#define VERSIONS 3
#endif
#ifndef FAULTS
#define FAULTS 1              /* deaths, cut connections and repeated answers */
#endif
#define WORKERS 2
#define SLOTS (WORKERS + 2)   /* the newest, one that is read by each worker, one to write to */
#define NONE SLOTS

mtype = { connecting, current, behind, suspect, lost };

#ifdef TRACE
mtype = { sent, reported, joined, committed, counts, lacks_it };
typedef Event { mtype kind; byte worker; byte version }
Event history[LENGTH];
byte position;
bool rejected = true;
#define next(its_kind, w, v) (position < LENGTH && history[position].kind == its_kind \
                              && history[position].worker == w && history[position].version == v)
#define step position++
#else
#define next(its_kind, w, v) true
#define step skip
#endif

typedef Slot { byte first; byte second }   /* the version that is in each half */
typedef Status {              /* a worker, as the sender sees it */
  mtype state = connecting;
  byte wanted;                /* the newest version meant for it */
  byte life;                  /* its receiver: 0 before one has connected, then 1, 2, ... */
  byte reads = NONE;          /* the slot that it has accepted */
  bool open                   /* its delivery of the send that is pending has not ended */
}
typedef Receiver {
  bool alive = true;
  bool connected;
  byte mute;                  /* nothing of it arrives, and the sender is not told: 1 for a while, 2 for good */
  byte life = 1;
  byte held;                  /* the version of its model */
  byte half;                  /* how many halves are staged */
  byte first; byte second;
  byte owes                   /* the version that is committed, and not answered for */
}

Slot slot[SLOTS];
Status status[WORKERS];
Receiver receiver[WORKERS];
chan answers[WORKERS] = [VERSIONS + FAULTS] of { byte, byte };   /* life, version */
byte newest, newest_slot = NONE, writes = NONE, faults = FAULTS;
bool pending;

bool whole_versions = true, forward_only = true, honest_answers = true;
bool sends_end = true, up_to_date = true, next_send_works = true;
#define promise(name, holds) if :: holds :: else -> name = false; assert(name) fi

#define is_read(s) (status[0].reads == s || status[1].reads == s)
#define is_free(s) (s < SLOTS && s != newest_slot && !is_read(s))
#define lacks(w) (status[w].state == current && receiver[w].alive \
                  && status[w].life == receiver[w].life && receiver[w].held < status[w].wanted)

inline lose(w) {              /* the sender finds that the receiver is gone */
  status[w].state = lost; status[w].open = false; status[w].reads = NONE;
  receiver[w].connected = false
}

inline choose_slot() {
  promise(next_send_works, is_free(0) || is_free(1) || is_free(2) || is_free(3));
  if
  :: is_free(0) -> writes = 0
  :: !is_free(0) && is_free(1) -> writes = 1
  :: !is_free(0) && !is_free(1) && is_free(2) -> writes = 2
  :: else -> writes = 3
  fi
}

inline offer(w) {
  status[w].wanted = newest;
  if
  :: status[w].state == current -> status[w].state = behind
  :: else
  fi;
  status[w].open = status[w].state != lost
}

inline answered(w, its_life, version) {
  if
  :: its_life == status[w].life && version == status[w].wanted ->
     status[w].state = current; status[w].open = false
  :: else                     /* of an older version, or of a receiver that was replaced */
  fi
}

inline give_up(w) {           /* the deadline is over */
  if
  :: status[w].open -> status[w].state = suspect; status[w].open = false
  :: else
  fi
}

active proctype Sender() {
  byte its_life, version;
end:
  do
  :: atomic { !pending && writes == NONE && newest < VERSIONS ->
     choose_slot(); slot[writes].first = newest + 1 }
  :: atomic { writes != NONE && next(sent, 0, newest + 1) -> step;
     slot[writes].second = newest + 1; newest++; newest_slot = writes; writes = NONE;
     offer(0); offer(1); pending = true }
  :: atomic { pending && !status[0].open && !status[1].open && next(reported, 0, newest) -> step;
     pending = false }
  :: atomic { pending && next(reported, 0, newest) -> step; give_up(0); give_up(1); pending = false }
  :: atomic { answers[0]?its_life, version -> answered(0, its_life, version); its_life = 0; version = 0 }
  :: atomic { answers[1]?its_life, version -> answered(1, its_life, version); its_life = 0; version = 0 }
  od
}

inline stage_first(w) {       /* it accepts the newest offer; the sender learns which slot is read */
  status[w].reads = newest_slot;
  receiver[w].first = slot[newest_slot].first; receiver[w].half = 1
}

inline commit(w) {
  promise(whole_versions, receiver[w].first == receiver[w].second);
  promise(forward_only, receiver[w].first > receiver[w].held);
  receiver[w].held = receiver[w].first; receiver[w].owes = receiver[w].held;
  receiver[w].half = 0; receiver[w].first = 0; receiver[w].second = 0;
  status[w].reads = NONE
}

inline die(w) {               /* an answer that it owes is lost, those that are on their way arrive */
  receiver[w].alive = false; receiver[w].held = 0; receiver[w].half = 0; receiver[w].owes = 0;
  receiver[w].first = 0; receiver[w].second = 0; receiver[w].mute = 0
}

proctype Worker(byte w) {
end:
  do
  :: atomic { receiver[w].alive && !receiver[w].connected &&     /* it joins, the first time or again */
              next(joined, w, 0) -> step;
     receiver[w].connected = true; status[w].life = receiver[w].life;
     status[w].state = (status[w].wanted > receiver[w].held -> behind : current) }
  :: atomic { receiver[w].alive && receiver[w].connected && !receiver[w].mute && !receiver[w].half &&
              !receiver[w].owes && status[w].wanted > receiver[w].held -> stage_first(w) }
  :: atomic { receiver[w].half == 1 ->
     receiver[w].second = slot[status[w].reads].second; receiver[w].half = 2 }
  :: atomic { receiver[w].half == 2 && next(committed, w, receiver[w].first) -> step; commit(w) }
  :: atomic { receiver[w].owes && !receiver[w].mute ->
     answers[w]!receiver[w].life, receiver[w].owes; receiver[w].owes = 0 }
  /* Faults. */
  :: atomic { faults && receiver[w].alive -> faults--; die(w) }
  :: atomic { faults && receiver[w].alive && receiver[w].connected -> faults--; die(w); lose(w) } /* it leaves */
#ifndef TRACE
  :: atomic { faults && receiver[w].connected && receiver[w].alive -> faults--; receiver[w].mute = 1 }
  :: atomic { faults && receiver[w].connected && receiver[w].alive -> faults--; receiver[w].mute = 2 }
  :: atomic { faults && receiver[w].held && nfull(answers[w]) ->                /* it answers twice */
     faults--; answers[w]!receiver[w].life, receiver[w].held }
#endif
  /* What follows them. */
  :: atomic { !receiver[w].alive && receiver[w].connected -> lose(w) }
  :: atomic { receiver[w].mute == 1 -> receiver[w].mute = 0 }
  :: atomic { !receiver[w].alive && receiver[w].life <= FAULTS ->               /* another takes its place */
     lose(w); receiver[w].alive = true; receiver[w].life++ }
  od
}

init { atomic { run Worker(0); run Worker(1) } }

#define is_up_to_date(w) (receiver[w].mute || (receiver[w].held == newest && status[w].state == current))

#ifdef TRACE
#define is_counted(w) (next(counts, w, status[w].wanted) && status[w].state == current)
#define is_lacking(w) (next(lacks_it, w, status[w].wanted) && status[w].state != current)

active proctype Trace() {
end:
  do
  :: atomic { is_counted(0) || is_counted(1) || is_lacking(0) || is_lacking(1) -> step }
  :: d_step { position == LENGTH -> rejected = false; assert(rejected) }
  od
}
#else
active proctype Promises() {
end:
  do
  :: d_step { lacks(0) || lacks(1) -> promise(honest_answers, false) }
  :: atomic { timeout ->      /* nothing more can happen */
     promise(sends_end, !pending);
     promise(up_to_date, newest == VERSIONS && is_up_to_date(0) && is_up_to_date(1)) } -> break
  od
}
#endif
