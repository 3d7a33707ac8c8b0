"""Stores of rows: tables on disk that are trained in place."""
