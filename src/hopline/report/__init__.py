"""What a run did: its records, its HTML page, and its bottleneck.

    writer       appends records to metrics.jsonl while a run lasts, and writes a Chrome trace at its end
    page         makes report.html from these files
    charts       draws curves and bars as SVG, for the page
    format       writes times, shares and counts for people
    settings     tells changed settings from defaults
    bottleneck   says why an epoch takes as long as it does, and what to change

Other programs read the records: add keys, do not rename them. The folder imports from `tables` and the
packages below it.
"""
