"""Records to protobuf messages and back. Everything that comes in is checked; a violation is a RemoteProtocolError."""
