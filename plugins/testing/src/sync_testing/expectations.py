"""Messages that many assertions of the conformance suite share."""

from __future__ import annotations

NO_NEWS = "receive() must return None where there is no newer version"
VALUES = "a model must have exactly the weights that were sent to it"
REPORT = "the report must say which workers were updated and which were not"
RECEIVED = "a worker must receive the newest version that it does not have"
NOTHING_SENT = "a send that is refused must not count as a version"
TRAINER = "the trainer's tensors must stay as they were"
BASE = "the report must name the version on which a worker's increment builds"
MEMBERS = "workers must be those that were made or added, less those that were removed"
ALIVE = "alive() must say whether the worker runs"
CLOSED = "a worker that ends must close what it hosts, once"
CALLS = "a call must run on what its worker hosts, in order, and bring back the result"
LOST = "WorkerLostError must name the worker that ended, and the function that it did not finish"
REMOTE_ERROR = "an error must name the worker, the function and the exception, with its traceback"
