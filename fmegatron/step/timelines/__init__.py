"""Timelines of a step: what it computes and communicates when, planned or measured."""
