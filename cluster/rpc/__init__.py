"""gRPC: the wire between coordinators, workers and the ingress."""

import os

# The event engine hands every message to another thread first.  A round waits for four to six
# messages in turn, each of which takes 0.05 to 0.1 ms less where the thread that polls reads and
# writes itself.  Asked for before gRPC starts; gRPC names what it does not know in its log.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
