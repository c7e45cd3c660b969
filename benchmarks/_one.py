import sys, json, tempfile, time, statistics, itertools
from benchmarks.predict import *
from pipeline.planning import make_plan
def probe(rank,config,folder,plan):
    import resource, torch, os
    from pipeline.training import train, Trainer, BatchReader, Order, SplitReader
    from pipeline.training.distributed import connect
    from pipeline.embeddings import TouchedRows
    dev=connect(config); store=Store(folder); rec=[]
    def out():
        return resource.getrusage(resource.RUSAGE_SELF)
    u0=out(); 
    train(config, store, store.get("datasets/bench", "dataset"), Plan.from_json(plan), "runs/bench/ckpt","bench", rec.append)
    res=dict(intervals=[round(x["step_ms"],1) for x in rec])
    split=SplitReader(store, store.get("datasets/bench","dataset"),"train")
    tr=Trainer(config,split.schema,Plan.from_json(plan),dev)
    order=Order(key="k",seed=1,global_batch=config.train.global_batch,rank=rank,world_size=config.world_size)
    with BatchReader(split,order) as rd: batches=list(rd)
    def go(name):
        it=iter(batches); ts=[]
        u=out()
        for _ in range(len(batches)-2):
            t=time.perf_counter(); tr.step(it); ts.append((time.perf_counter()-t)*1e3)
        v=out()
        n=len(batches)
        res[name]=[round(statistics.median(ts),1),round(min(ts),1), 'cpu/step %.1f sys %.1f flt %.0f invol %d vol %d'%((v.ru_utime-u.ru_utime)/n*1e3,(v.ru_stime-u.ru_stime)/n*1e3,(v.ru_minflt-u.ru_minflt)/n,(v.ru_nivcsw-u.ru_nivcsw)/n,(v.ru_nvcsw-u.ru_nvcsw)/n)]
    go("bare"); go("bare2")
    with BatchReader(split,order) as rd:
        batches_=itertools.islice(rd,len(batches)-1); ts=[]
        for _ in range(len(batches)-3):
            t=time.perf_counter(); tr.step(batches_); ts.append((time.perf_counter()-t)*1e3)
        res["reader"]=[round(statistics.median(ts),1),round(min(ts),1)]
    if rank==0:
        it=iter(batches)
        if config.world_size==1:
            with torch.profiler.profile() as p:
                for i in range(8): tr.step(it)
            print(p.key_averages().table(sort_by="self_cpu_time_total",row_limit=14,max_name_column_width=50))
    return res
def main():
    for n in map(int,sys.argv[2:]):
        steps=int(sys.argv[1])
        case=random_case(n,2026)
        hw=HardwareConfig(name="x",ranks_per_host=case.ranks,ddr_gib=8.0)
        cfg=config_of(case,hw,steps)
        with tempfile.TemporaryDirectory() as d:
            art,schema,prof=make_dataset(Store(d),case,steps,n+1)
            plan=make_plan(cfg,schema,prof)
            r=run_ranks(case.ranks,probe,cfg,d,plan.to_json())
        print(n,case,r,flush=True)
if __name__=="__main__": main()
