"""Faster implementations of what other folders define: same results, less time.

Found by `common.speedups.find`, and by nothing else outside this folder.
"""
