"""Kubernetes: what stages look like as jobs and pods, and how they are submitted, followed and diagnosed."""
