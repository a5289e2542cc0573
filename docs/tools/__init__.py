"""Writes what is generated: gRPC stubs, pages of docs/, dashboards.  No part of the product."""
