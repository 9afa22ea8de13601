/* How all workers of a send commit a version, or none: two_phase:: of ../how-to/all-or-none.md, as a model that
 * Spin searches.
 *
 * A sender has each worker stage a version, counts their answers, decides, and tells one worker after
 * the other. Workers cannot stage, die before and after they said yes, are cut off, wait too long
 * and are replaced; the sender dies at any step. Every order of these steps is searched. A promise
 * that does not hold is a violated assertion of its name:
 *
 *   all_said_yes      a version is committed only if the last word of every worker of the send is yes
 *   as_decided        no worker commits a version unless the sender has decided that all commit it
 *   forward_only      versions only grow in a worker
 *   waits_long_enough a worker that hears nothing keeps the version staged, and its old one, for the
 *                     stated time
 *   sends_end         every send ends, if the sender lives
 *   everywhere        in the end, all workers that are not cut off have the newest version that was
 *                     decided to be committed, if the sender lives
 *
 *   spin -a two-phase.pml && gcc -DSAFETY -o pan pan.c && ./pan
 */
#ifndef VERSIONS
#define VERSIONS 2
#endif
#ifndef FAULTS
#define FAULTS 1              /* deaths, cut connections, refusals and the end of the sender */
#endif
#define WORKERS 2
#define BOTH 3                /* a bit for each worker */
#define bit(w) (1 << w)

mtype = { nothing, yes, no };                  /* a worker's word about a version */
mtype = { idle, staging, telling, settling };  /* what the sender does */
mtype = { stage, commit, drop };               /* to a worker */
mtype = { accepted, refused, committed, lacks };  /* from a worker */

typedef Worker {
  bool alive = true;
  byte cut;                   /* nothing that it says or hears gets through: 1 for a while, 2 for good */
  byte life = 1;
  byte held;                  /* the version of its model */
  byte staged;
  bool said;                  /* it has answered for what is staged */
  bool over                   /* the time for which it waits is over */
}

Worker worker[WORKERS];
chan down[WORKERS] = [6] of { mtype, byte };
chan up[WORKERS] = [6] of { mtype, byte };
byte alone[WORKERS];          /* a version that all others have, for a worker that lacks it; the next
                                 version that is sent replaces it on its way */

/* The sender. */
bool lives = true;
mtype does = idle;
byte version, newest, decided, commits, staged, failed, told, ended, lack;
byte faults = FAULTS;
mtype word[WORKERS] = nothing;   /* what each worker has said last of the version */

bool all_said_yes = true, as_decided = true, forward_only = true, waits_long_enough = true;
bool sends_end = true, everywhere = true;
#define promise(name, holds) if :: holds :: else -> name = false; assert(name) fi

inline decide(to_commit) {
  if
  :: to_commit ->
     promise(all_said_yes, word[0] == yes && word[1] == yes);
     newest = version; commits = commits | (1 << version)
  :: else
  fi;
  decided = version; does = telling; told = 0; ended = 0
}

inline send_alone(w) {        /* not now if a version is on its way, which comes first */
  lack = lack | bit(w);
  if
  :: does != staging -> alone[w] = newest
  :: else
  fi
}

inline tell(w) {
  if
  :: newest == version -> down[w]!commit, version
  :: newest != version && !(lack & bit(w)) -> down[w]!drop, version
  :: else -> down[w]!drop, version; alone[w] = newest
  fi;
  told = told | bit(w);
  if
  :: told == BOTH -> does = settling
  :: else
  fi
}

inline hear(w) {              /* act on a worker's answer */
  up[w]?said, which;
  if
  :: said == accepted && which == version && decided != version ->
     word[w] = yes; staged = staged | bit(w)
  :: said == refused && which == version && decided != version ->
     word[w] = no; staged = staged & ~bit(w); failed = failed | bit(w)
  :: said == committed && which == newest -> ended = ended | bit(w); lack = lack & ~bit(w)
  :: said == lacks && which == newest -> send_alone(w)
  :: else                     /* late */
  fi;
  said = 0; which = 0
}

active proctype Sender() {
  mtype said; byte which;
end:
  do
  :: atomic { lives && does == idle && version < VERSIONS ->
     version++; does = staging; staged = 0; failed = 0; word[0] = nothing; word[1] = nothing;
     
     alone[0] = 0; alone[1] = 0; down[0]!stage, version; down[1]!stage, version }
  :: atomic { lives && does == staging && staged == BOTH -> decide(true) }
  :: atomic { lives && does == staging && failed -> decide(false) }
  :: atomic { lives && does == staging -> decide(false) }          /* the deadline is over */
  :: atomic { lives && does == telling && !(told & bit(0)) -> tell(0) }
  :: atomic { lives && does == telling && !(told & bit(1)) -> tell(1) }
  :: atomic { lives && does == settling && (newest != version || ended == BOTH) -> does = idle }
  :: atomic { lives && does == settling -> does = idle }           /* the deadline is over */
  :: atomic { lives && nempty(up[0]) && !worker[0].cut -> hear(0) }
  :: atomic { lives && nempty(up[1]) && !worker[1].cut -> hear(1) }
  :: atomic { faults && lives && does != idle -> faults--; lives = false }
  od
}

inline forget_staged(w) { worker[w].staged = 0; worker[w].said = false; worker[w].over = false }

inline do_commit(w, it) {
  promise(as_decided, commits & (1 << it));
  promise(forward_only, it > worker[w].held);
  worker[w].held = it; forget_staged(w)
}

inline act_on(w) {            /* act on a message of the sender */
  down[w]?what, which;
  if
  :: what == stage -> worker[w].staged = which
  :: what == commit && worker[w].staged == which -> do_commit(w, which); up[w]!committed, which
  :: what == commit && worker[w].staged != which -> up[w]!lacks, which
  :: what == drop && worker[w].staged == which -> forget_staged(w)
  :: else
  fi;
  what = 0; which = 0
}

inline act_alone(w) {
  if
  :: alone[w] > worker[w].held -> do_commit(w, alone[w])
  :: else
  fi;
  up[w]!committed, worker[w].held; alone[w] = 0
}

inline die(w) {               /* what it has said may still arrive; what it was sent does not */
  worker[w].alive = false; worker[w].cut = 0; worker[w].held = 0; forget_staged(w); alone[w] = 0;
  do :: down[w]?_, _ :: empty(down[w]) -> break od
}

inline lose(w) {              /* the sender finds that it is gone */
  do :: up[w]?_, _ :: empty(up[w]) -> break od;
  if
  :: does == staging -> word[w] = no; staged = staged & ~bit(w); failed = failed | bit(w)
  :: else -> ended = ended | bit(w)
  fi
}

inline join(w) {              /* a new receiver has no vote; it gets what was decided about */
  worker[w].alive = true; worker[w].life++;
  if
  :: newest -> send_alone(w)
  :: else
  fi
}

#define hears(w) (worker[w].alive && !worker[w].cut)
#define is_staged(w) (worker[w].alive && worker[w].staged)

proctype Receiver(byte w) {
  mtype what; byte which;
end:
  do
  :: atomic { hears(w) && nempty(down[w]) && (!worker[w].staged || worker[w].said) -> act_on(w) }
  :: atomic { hears(w) && alone[w] && empty(down[w]) && !worker[w].staged -> act_alone(w) }
  :: atomic { is_staged(w) && !worker[w].said && lives -> up[w]!accepted, worker[w].staged; worker[w].said = true }
  :: atomic { is_staged(w) && worker[w].said -> worker[w].over = true }           /* time passes */
  :: atomic { is_staged(w) && worker[w].over ->                                   /* it withdraws its yes */
     promise(waits_long_enough, worker[w].over);
     up[w]!refused, worker[w].staged; forget_staged(w) }
  :: atomic { is_staged(w) && !lives && !worker[w].cut && empty(down[w]) -> forget_staged(w) }  /* it sees that the sender is gone */
  /* Faults. */
  :: atomic { faults && is_staged(w) && !worker[w].said && lives ->               /* torn, or it does not fit */
     faults--; up[w]!refused, worker[w].staged; forget_staged(w) }
  :: atomic { faults && worker[w].alive && !worker[w].cut -> faults--; worker[w].cut = 1 }
  :: atomic { faults && worker[w].alive && !worker[w].cut -> faults--; worker[w].cut = 2 }
  :: atomic { faults && worker[w].alive -> faults--; die(w) }
  /* What follows them. */
  :: atomic { worker[w].cut == 1 -> worker[w].cut = 0 }
  :: atomic { !worker[w].alive && worker[w].life <= FAULTS && lives -> lose(w); join(w) }
  od
}

init { atomic { run Receiver(0); run Receiver(1) } }

#define is_done(w) (worker[w].cut || worker[w].held == newest)

active proctype Promises() {
end:
  do
  :: atomic { timeout ->      /* nothing more can happen */
     promise(sends_end, !lives || (does == idle && version == VERSIONS));
     promise(everywhere, !lives || (is_done(0) && is_done(1))) } -> break
  od
}
