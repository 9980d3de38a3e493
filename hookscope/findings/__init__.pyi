from .finding import Finding as Finding, counted as counted, listed as listed, percent as percent
